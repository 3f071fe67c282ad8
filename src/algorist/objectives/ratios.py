"""How much more likely the policy makes a completion than the policy that sampled it."""

from __future__ import annotations

import torch
from torch import Tensor

from algorist.objectives.masks import masked_sum


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return ``log_probs - old_log_probs``, 0 where the mask is false.

    Args:
        log_probs: (B, T) under the policy.
        old_log_probs: (B, T) under the policy that sampled; no gradient flows into it.
        mask: (B, T), 1 for completion tokens.
    """
    difference = log_probs - old_log_probs.detach()
    return difference if mask is None else torch.where(mask.bool(), difference, torch.zeros_like(difference))


def token_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the importance ratio of each token, (B, T); 1 where the mask is false.

    Source: PPO (1707.06347) eq. 6; GRPO (2402.03300) eq. 3.
    """
    return torch.exp(log_ratio(log_probs, old_log_probs, mask))


def sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the length-normalised ratio of each sequence, (B, 1): the geometric mean of its token ratios.

    A row without tokens has ratio 1. Source: GSPO (2507.18071) eq. 7.
    """
    total = masked_sum(log_ratio(log_probs, old_log_probs, mask), mask, dim=-1)
    return torch.exp(total / mask.sum(-1).clamp(min=1)).unsqueeze(-1)


def truncated_weights(
    old_log_probs: Tensor, sampler_log_probs: Tensor, mask: Tensor, cap: float = 2.0
) -> Tensor:
    """Return ``min(p_old / p_sampler, cap)`` per token, (B, T), 0 outside the mask, without gradient.

    Corrects for a sampler (another engine, another precision) whose probabilities differ from the trainer's.
    Source: truncated importance sampling, Ionides 2008; Yao et al. 2025.
    """
    weights = torch.exp(log_ratio(old_log_probs.detach(), sampler_log_probs, mask)).clamp(max=cap)
    return weights * mask
