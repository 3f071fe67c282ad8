"""Rewards of other systems, as they were published: CS336's, open-r1's, DAPO's, the GSM8K gist's, OneShotGRPO's."""

from __future__ import annotations

from algorist_grader.registry import add_module

for _module in ("small_models", "systems"):
    add_module(f"{__name__}.{_module}", "reward")
