"""Importance ratios between the policy and the policy that sampled."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

from algorist.objectives.masks import masked_sum

if TYPE_CHECKING:
    from torch import Tensor

Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return ``log_probs - old_log_probs``, 0 where the mask is false.

    Args:
        log_probs: (B, T) under the policy.
        old_log_probs: (B, T) under the policy that sampled; no gradient flows into it.
        mask: (B, T), 1 for completion tokens.
    """
    difference = log_probs - old_log_probs.detach()
    return difference if mask is None else difference.masked_fill(~mask.bool(), 0.0)


def token_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the importance ratio of each token, (B, T); 1 where the mask is false.

    Source: PPO (1707.06347) eq. 6; GRPO (2402.03300) eq. 3.
    """
    return log_ratio(log_probs, old_log_probs, mask).exp()


def sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the length-normalised ratio of each sequence, (B, 1): the geometric mean of its token ratios.

    A row without tokens has ratio 1. Source: GSPO (2507.18071) eq. 7.
    """
    total = masked_sum(log_ratio(log_probs, old_log_probs, mask), mask, dim=-1)
    return (total / mask.sum(-1).clamp(min=1)).exp().unsqueeze(-1)


def truncated_weights(
    old_log_probs: Tensor, sampler_log_probs: Tensor, mask: Tensor, cap: float = 2.0
) -> Tensor:
    """Return ``min(p_old / p_sampler, cap)`` per token, (B, T), 0 outside the mask, without gradient.

    Corrects for a sampler (another engine, another precision) whose probabilities differ from the trainer's.
    Source: truncated importance sampling, Ionides 2008; Yao et al. 2025.
    """
    return sampler_weights(old_log_probs, sampler_log_probs, mask, "token_truncate", high=cap) * mask


def sampler_weights(
    old_log_probs: Tensor,
    sampler_log_probs: Tensor,
    mask: Tensor,
    mode: Correction = "token_truncate",
    *,
    low: float | None = None,
    high: float | None = 2.0,
) -> Tensor:
    """Return the weights p_old / p_sampler that correct for a sampler that differs from the trainer, without gradient.

    Args:
        old_log_probs: (B, T) by the trainer, of the policy that sampled.
        sampler_log_probs: (B, T) by the sampler; NaN where it gave none, which counts as no difference.
        mask: (B, T), 1 for completion tokens.
        mode: Ratios of tokens or of whole sequences; those outside [low, high] are cut off there (``truncate``) or weigh 0
            (``mask``).
        low: Least weight; None is no bound.
        high: Greatest weight; None is no bound.

    Returns:
        (B, T) for the token modes, 1 outside the mask; (B, 1) for the sequence modes.

    Source: Yao et al. 2025 (truncated), Liu et al. 2025 (masked); as TRL's ``vllm_importance_sampling_mode``.
    """
    if mode not in get_args(Correction):
        raise ValueError(
            f"unknown importance sampling mode '{mode}'; expected one of {', '.join(get_args(Correction))}"
        )
    difference = log_ratio(old_log_probs.detach(), sampler_log_probs, mask).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    weights = difference.exp()
    least, most = -math.inf if low is None else low, math.inf if high is None else high
    if mode.endswith("truncate"):
        return weights.clamp(least, most)
    return weights.masked_fill((weights < least) | (weights > most), 0.0)


def on_policy_sequences(
    log_probs: Tensor, sampler_log_probs: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Select completions to learn from: not those of negative advantage that the policy has moved away from.

    A completion is masked where its advantage is negative and the mean over its tokens of log p_sampler - log p is above ``threshold``.

    Args:
        log_probs: (B, T) under the policy; no gradient flows into the mask.
        sampler_log_probs: (B, T) of the policy that sampled; NaN where the sampler gave none, which counts as no difference.
        advantages: (B, T) or (B, 1); of a completion whose tokens differ their mean decides.
        mask: (B, T), true for the tokens that count.
        threshold: In nats per token.

    Returns:
        (B, 1) bool.

    Source: DeepSeek-V3.2 (2512.02556) eq. 9; as TRL's ``off_policy_mask_threshold``.
    """
    mask = mask.bool()
    tokens = mask.sum(-1, keepdim=True).clamp(min=1)
    moved = (
        masked_sum((sampler_log_probs - log_probs.detach()).nan_to_num(nan=0.0), mask, -1)[:, None] / tokens
    )
    advantage = masked_sum(advantages.expand(mask.shape), mask, -1)[:, None] / tokens
    return (advantage >= 0) | (moved <= threshold)


# ---- estimates of KL(policy ‖ reference) per token, from samples of the policy


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return -log r: unbiased, high variance, negative for half of the tokens. Shapes (B, T) → (B, T)."""
    return log_probs - ref_log_probs


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return (log r)² / 2: low variance, biased; its gradient is that of the true KL. Shapes (B, T) → (B, T)."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return r - 1 - log r: unbiased, low variance, never negative; GRPO's penalty. Shapes (B, T) → (B, T)."""
    difference = ref_log_probs - log_probs
    return difference.expm1() - difference
