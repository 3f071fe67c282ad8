"""Rewards: named functions by theme; the total is their weighted sum.

``correctness`` right or wrong, ``mathematics`` formulas, ``ratio_bands`` DAPO's, ``form`` tags, ``style``
steps and repetition, ``length``, ``control`` the random control. ``build_rewards`` makes a recipe's list into callables for TRL.
"""

from algorist.rewards import control, correctness, form, length, mathematics, ratio_bands, style  # noqa: F401
from algorist.rewards.base import REWARDS, Reward, reward
from algorist.rewards.build import (
    GOLD_COLUMNS,
    RewardBreakdown,
    RewardSet,
    TrainerReward,
    breakdown,
    build_rewards,
)
from algorist.rewards.defaults import DEFAULT_REWARD_WEIGHTS, DEFAULT_REWARDS, default_reward_functions
from algorist.rewards.extract import text_of
from algorist.rewards.mathematics import question_only_reward_fn, r1_zero_reward_fn
from algorist.rewards.reference import reference_markdown
from algorist.rewards.user import load_user_reward

__all__ = [
    "DEFAULT_REWARDS",
    "DEFAULT_REWARD_WEIGHTS",
    "GOLD_COLUMNS",
    "REWARDS",
    "Reward",
    "RewardBreakdown",
    "RewardSet",
    "TrainerReward",
    "breakdown",
    "build_rewards",
    "default_reward_functions",
    "load_user_reward",
    "question_only_reward_fn",
    "r1_zero_reward_fn",
    "reference_markdown",
    "reward",
    "text_of",
]
