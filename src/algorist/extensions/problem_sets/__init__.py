"""Problems beyond the quickstart's: countdown, story problems, reasoning-gym, and mixtures of sets."""

from __future__ import annotations

from algorist_grader.registry import add_module

for _name in ("countdown", "mixture", "reasoning_gym", "story_problems"):
    add_module(f"{__name__}.{_name}", "dataset")
