"""Rewards: named functions by theme; the total is their weighted sum.

``correctness`` right or wrong, ``form`` tags, ``style`` steps and repetition, ``length``, ``control`` the random control;
the reference systems' own rules in ``systems``. ``build_rewards`` makes a recipe's list into callables for TRL.
"""

from algorist.rewards import control, correctness, form, length, style  # noqa: F401
from algorist.rewards.base import REWARDS, Reward, reward
from algorist.rewards.build import (
    DEFAULT_REWARD_WEIGHTS,
    DEFAULT_REWARDS,
    RewardBreakdown,
    RewardSet,
    TrainerReward,
    breakdown,
    build_rewards,
    default_reward_functions,
)
from algorist.rewards.extract import text_of
from algorist.rewards.systems import cs336, dapo, open_r1  # noqa: F401
from algorist.rewards.systems.cs336 import question_only_reward_fn, r1_zero_reward_fn
from algorist.rewards.user import load_user_reward

__all__ = [
    "DEFAULT_REWARDS",
    "DEFAULT_REWARD_WEIGHTS",
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
    "reward",
    "text_of",
]
