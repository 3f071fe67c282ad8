"""From rewards to advantages: each completion is compared with the others of its group.

Rewards are (B,) with B = P·G, the G completions of a problem next to each other; advantages have the same shape.
A reward may be NaN ("no verdict"): it is left out of its group's statistics and gets advantage 0. All standard
deviations are unbiased (divisor G - 1), as torch and TRL take them; a group of one has deviation 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def _grouped(rewards_B: Tensor, group_size: int) -> Tensor:
    if rewards_B.dim() != 1 or group_size < 1 or rewards_B.numel() % group_size:
        raise ValueError(
            f"rewards have shape {tuple(rewards_B.shape)} and group_size is {group_size}; expected one dimension whose "
            "length is a multiple of group_size"
        )
    return rewards_B.view(-1, group_size)


def _deviation(rewards_PG: Tensor) -> Tensor:
    """Return the unbiased standard deviation of each row, NaN left out, (P, 1); 0 for fewer than two values."""
    count = (~rewards_PG.isnan()).sum(-1, keepdim=True)
    squares = (rewards_PG - rewards_PG.nanmean(-1, keepdim=True)).square().nansum(-1, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def group_centered(rewards_B: Tensor, group_size: int) -> Tensor:
    """Return reward minus group mean: Dr. GRPO's advantages, without the bias of dividing by the deviation.

    Source: Dr. GRPO (2503.20783) section 3.2.
    """
    rewards_PG = _grouped(rewards_B, group_size)
    return (rewards_PG - rewards_PG.nanmean(-1, keepdim=True)).flatten().nan_to_num(nan=0.0)


def group_normalized(rewards_B: Tensor, group_size: int, eps: float = 1e-6) -> Tensor:
    """Return (reward - group mean) / (group deviation + eps): GRPO's advantages.

    ``eps`` is 1e-6 in CS336 and 1e-4 in TRL. A group of equal rewards gets zeros. Source: GRPO (2402.03300) 4.1.2.
    """
    deviation = _deviation(_grouped(rewards_B, group_size)).expand(-1, group_size).flatten()
    return group_centered(rewards_B, group_size) / (deviation.nan_to_num(nan=0.0) + eps)


def batch_normalized(rewards_B: Tensor, group_size: int, eps: float = 1e-4) -> Tensor:
    """Return (reward - group mean) / (deviation of all rewards + eps), TRL's ``scale_rewards="batch"``."""
    return group_centered(rewards_B, group_size) / (_deviation(rewards_B.view(1, -1)).squeeze() + eps)


def leave_one_out(rewards_B: Tensor, group_size: int) -> Tensor:
    """Return reward minus the mean of the others of its group: RLOO, an unbiased baseline.

    Equal to G / (G - 1) times ``group_centered``; a group of one gets 0. Source: RLOO (2402.14740) eq. 7.
    """
    rewards_PG = _grouped(rewards_B, group_size)
    count = (~rewards_PG.isnan()).sum(-1, keepdim=True).expand_as(rewards_PG).flatten()
    return group_centered(rewards_B, group_size) * count / (count - 1).clamp(min=1)


def useful_groups(rewards_B: Tensor, group_size: int, tolerance: float = 1e-8) -> Tensor:
    """Return which groups teach something, (P,) bool: those whose rewards are not all equal.

    DAPO samples until a batch consists of such groups only. Source: DAPO (2503.14476) section 3.2.
    """
    return _deviation(_grouped(rewards_B, group_size)).squeeze(-1).nan_to_num(nan=0.0) > tolerance


RewardFn = Callable[[str, Any], Mapping[str, float]]


def compute_group_normalized_rewards(
    reward_fn: RewardFn,
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[Any],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Score responses and turn the rewards into group advantages.

    Args:
        reward_fn: ``f(response, ground_truth)`` with keys ``reward``, ``format_reward``, ``answer_reward``.
        rollout_responses: B texts, the responses to a question next to each other.
        repeated_ground_truths: B gold answers, each repeated ``group_size`` times.
        group_size: Responses per question.
        advantage_eps: Added to the deviation.
        normalize_by_std: Divide by the group's unbiased deviation (GRPO); False is Dr. GRPO.

    Returns:
        Advantages (B,), raw rewards (B,), and statistics: mean, std, min and max of the reward, the means of the other
        keys, and the share of useful groups.

    Raises:
        ValueError: The two lists differ in length, or their length is no multiple of ``group_size``.
    """
    if len(rollout_responses) != len(repeated_ground_truths):
        raise ValueError(
            f"{len(rollout_responses)} responses for {len(repeated_ground_truths)} ground truths; "
            "repeat each ground truth once per response"
        )
    scores = [reward_fn(r, g) for r, g in zip(rollout_responses, repeated_ground_truths, strict=True)]
    raw = torch.tensor([float(score["reward"]) for score in scores], dtype=torch.float32)
    if normalize_by_std:
        advantages = group_normalized(raw, group_size, advantage_eps)
    else:
        advantages = group_centered(raw, group_size)
    if not scores:
        return advantages, raw, {}
    metadata = {
        "reward_mean": float(raw.mean()),
        "reward_std": float(raw.std()) if len(raw) > 1 else 0.0,
        "reward_min": float(raw.min()),
        "reward_max": float(raw.max()),
        "useful_groups": float(useful_groups(raw, group_size).float().mean()),
    }
    for key in scores[0]:
        if key != "reward":
            metadata[f"{key}_mean"] = sum(float(score[key]) for score in scores) / len(scores)
    return advantages, raw, metadata
