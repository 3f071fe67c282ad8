"""The policy-gradient functions of the CS336 assignment, with its names, arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from algorist.objectives import group_centered, group_normalized, token_ratio, useful_groups

BasicLoss = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip"]


RewardFn = Callable[[str, Any], Mapping[str, float]]


def _column(advantages: Tensor) -> Tensor:
    return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """Return -A·log p per token: REINFORCE.

    Args:
        raw_rewards_or_advantages: (B,) or (B, 1), one value per completion.
        policy_log_probs: (B, T).

    Returns:
        (B, T), not reduced.
    """
    return -_column(raw_rewards_or_advantages) * policy_log_probs


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -min(ratio·A, clip(ratio)·A) per token: PPO's clipped objective.

    Args:
        advantages: (B,) or (B, 1).
        policy_log_probs: (B, T), with gradient.
        old_log_probs: (B, T), under the policy that sampled.
        cliprange: Ratios are clipped to 1 ± this.

    Returns:
        The loss (B, T), not reduced, and ``clipped`` (B, T): 1 where the clipped term is smaller, so that the token
        gets no gradient; ``ratio`` (B, T).

    Source: PPO (1707.06347) eq. 7.
    """
    ratio = token_ratio(policy_log_probs, old_log_probs)
    free = ratio * _column(advantages)
    clipped = ratio.clamp(1 - cliprange, 1 + cliprange) * _column(advantages)
    metadata = {"clipped": (clipped < free).to(ratio.dtype).detach(), "ratio": ratio.detach()}
    return -torch.minimum(free, clipped), metadata


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: BasicLoss,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the per-token loss of one of the three basic kinds.

    Args:
        policy_log_probs: (B, T).
        loss_type: ``no_baseline`` needs ``raw_rewards``; ``reinforce_with_baseline`` needs ``advantages``;
            ``grpo_clip`` needs ``advantages``, ``old_log_probs`` and ``cliprange``.
        raw_rewards: (B,) or (B, 1).
        advantages: (B,) or (B, 1).
        old_log_probs: (B, T).
        cliprange: Half the width of the clipping interval.

    Returns:
        The loss (B, T), not reduced, and the metadata of that kind.

    Raises:
        ValueError: Unknown kind, or an argument that the kind needs is missing.
    """
    needs: dict[str, dict[str, object]] = {
        "no_baseline": {"raw_rewards": raw_rewards},
        "reinforce_with_baseline": {"advantages": advantages},
        "grpo_clip": {"advantages": advantages, "old_log_probs": old_log_probs, "cliprange": cliprange},
    }
    if loss_type not in needs:
        raise ValueError(f"unknown loss_type '{loss_type}'; expected one of {', '.join(needs)}")
    missing = [name for name, value in needs[loss_type].items() if value is None]
    if missing:
        raise ValueError(f"loss_type '{loss_type}' needs {', '.join(missing)}")
    if loss_type == "no_baseline":
        assert raw_rewards is not None
        return compute_naive_policy_gradient_loss(raw_rewards, policy_log_probs), {}
    assert advantages is not None
    if loss_type == "reinforce_with_baseline":
        return compute_naive_policy_gradient_loss(advantages, policy_log_probs), {}
    assert old_log_probs is not None and cliprange is not None
    return compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange)


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
    if group_size < 1 or raw.numel() % group_size:
        raise ValueError(f"{raw.numel()} responses are no multiple of group_size {group_size}")
    grouped = raw.view(-1, group_size)
    if normalize_by_std:
        advantages = group_normalized(grouped, advantage_eps).flatten()
    else:
        advantages = group_centered(grouped).flatten()
    if not scores:
        return advantages, raw, {}
    metadata = {
        "reward_mean": float(raw.mean()),
        "reward_std": float(raw.std()) if len(raw) > 1 else 0.0,
        "reward_min": float(raw.min()),
        "reward_max": float(raw.max()),
        "useful_groups": float(useful_groups(grouped).float().mean()),
    }
    for key in scores[0]:
        if key != "reward":
            metadata[f"{key}_mean"] = sum(float(score[key]) for score in scores) / len(scores)
    return advantages, raw, metadata
