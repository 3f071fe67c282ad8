"""Rewards of other systems, as they were published: CS336's, open-r1's, DAPO's, the GSM8K gist's, OneShotGRPO's."""

from __future__ import annotations

from algorist_grader.registry import add_module

_MODULES = {
    "small_models": "DEFAULT_REWARDS DEFAULT_REWARD_WEIGHTS default_reward_functions",
    "systems": "question_only_reward_fn r1_zero_reward_fn",
}
MODULE_OF = {
    name: f"extensions.published_rewards.{module}"
    for module, names in _MODULES.items()
    for name in names.split()
}
"""Names that ``algorist`` offers."""
for _module in _MODULES:
    add_module(f"{__name__}.{_module}", "reward")
