"""The rewards that a GSM8K run takes when nobody says otherwise: right 1.0, a number 0.1, the tags 0.1."""

from __future__ import annotations

from algorist.rewards.build import RewardSet, build_rewards

DEFAULT_REWARDS = ("correctness_numeric", "numeric", "tag_fraction")
"""Names of the default rewards; a new one is registered in its theme's file and added here."""

DEFAULT_REWARD_WEIGHTS = [1.0, 0.1, 0.1]
"""Weights of the default rewards, in their order; the greatest total is 1.2."""


def default_reward_functions(prompt_format: str = "reasoning_answer") -> RewardSet:
    """Return the default rewards as TRL-callables with their weights."""
    specs = [{"name": n, "weight": w} for n, w in zip(DEFAULT_REWARDS, DEFAULT_REWARD_WEIGHTS, strict=True)]
    return build_rewards(specs, prompt_format)
