"""Rewards: a reward is a function of a rollout and its problem; a recipe's total is the weighted sum of those that it names.

``basic`` right or wrong, the format, length, the random control; ``user`` a user's own; those of other systems are an extension. ``build_rewards`` makes a recipe's list; each of them can be called as TRL calls rewards, too.
"""

from algorist.rewards.base import REWARDS, Reward, reward
from algorist.rewards.build import RewardBreakdown, RewardSet, breakdown, build_rewards, trl_reward
from algorist.rewards.trl_form import text_of
from algorist.rewards.user import load_user_reward

__all__ = [
    "REWARDS", "Reward", "RewardBreakdown", "RewardSet", "breakdown",
    "build_rewards", "load_user_reward",
    "reward", "text_of", "trl_reward",
]  # fmt: skip
