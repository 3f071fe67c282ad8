"""Rewards: a reward is a function of a rollout and its problem; a recipe's total is the weighted sum of those that it names.

``basic`` right or wrong, steps, length, tags, the random control; ``systems`` the reference systems' own rules; ``user`` a user's own. ``build_rewards`` makes a recipe's list; each of them can be called as TRL calls rewards, too.
"""

from algorist.rewards.base import REWARDS, Reward, reward
from algorist.rewards.build import (
    DEFAULT_REWARD_WEIGHTS,
    DEFAULT_REWARDS,
    RewardBreakdown,
    RewardSet,
    breakdown,
    build_rewards,
    default_reward_functions,
    trl_reward,
)
from algorist.rewards.trl_form import text_of
from algorist.rewards.user import load_user_reward

__all__ = [
    "DEFAULT_REWARDS", "DEFAULT_REWARD_WEIGHTS", "REWARDS", "Reward", "RewardBreakdown", "RewardSet", "breakdown",
    "build_rewards", "default_reward_functions", "load_user_reward",
    "reward", "text_of", "trl_reward",
]  # fmt: skip
