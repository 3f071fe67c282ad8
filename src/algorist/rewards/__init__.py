"""Rewards: named functions by theme; the total is their weighted sum."""

from algorist.rewards import correctness, form  # noqa: F401
from algorist.rewards.base import REWARDS, Reward, RewardInput, reward, text_of
from algorist.rewards.build import TrainerReward, build_rewards, user_reward

__all__ = [
    "REWARDS",
    "Reward",
    "RewardInput",
    "TrainerReward",
    "build_rewards",
    "reward",
    "text_of",
    "user_reward",
]
