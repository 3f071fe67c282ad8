"""One micro-batch: loss, backward, and numbers to log. For people who write their own loop."""

from __future__ import annotations

import torch
from torch import Tensor

from algorist.extensions.toolkit.policy_gradient import BasicLoss, compute_policy_gradient_loss
from algorist.objectives.masks import masked_mean, masked_normalize, masked_sum


def sft_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run backward on the negative log-likelihood of the responses.

    The loss is -Σ_t log p / ``normalize_constant`` per row, averaged over the rows and divided by
    ``gradient_accumulation_steps``. Rows without response tokens add 0 and are counted.

    Args:
        policy_log_probs: (B, T), with gradient.
        response_mask: (B, T), 1 for response tokens.
        gradient_accumulation_steps: Micro-batches per optimiser step; for a last, smaller window its true number.
        normalize_constant: Divides the sum over tokens.

    Returns:
        The scalar that backward ran on (detached), and ``nll_per_token`` and ``response_tokens``.
    """
    per_row = masked_normalize(-policy_log_probs, response_mask, -1, normalize_constant)
    loss = per_row.mean() / gradient_accumulation_steps
    loss.backward()
    tokens = response_mask.bool().sum()
    nll = masked_sum(-policy_log_probs.detach(), response_mask) / tokens.clamp(min=1)
    return loss.detach(), {"nll_per_token": nll, "response_tokens": tokens}


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: BasicLoss,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    *,
    normalize_constant: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run backward on a policy-gradient loss.

    The per-token loss is averaged over each row's response tokens, then over the rows, and divided by
    ``gradient_accumulation_steps``. With ``normalize_constant`` each row's sum is divided by that instead (Dr. GRPO's
    length normalisation). Rows without response tokens add 0 and are counted.

    Args:
        policy_log_probs: (B, T), with gradient.
        response_mask: (B, T), 1 for response tokens.
        gradient_accumulation_steps: Micro-batches per optimiser step.
        loss_type: ``no_baseline``, ``reinforce_with_baseline`` or ``grpo_clip``.
        raw_rewards: (B,) or (B, 1), for ``no_baseline``.
        advantages: (B,) or (B, 1), for the other two.
        old_log_probs: (B, T), for ``grpo_clip``.
        cliprange: For ``grpo_clip``.
        normalize_constant: Divisor of each row's sum; None takes the row's number of tokens.

    Returns:
        The scalar that backward ran on (detached), and the means over response tokens of the kind's metadata.

    Raises:
        ValueError: An argument that the kind needs is missing.
    """
    inside = torch.where(response_mask.bool(), policy_log_probs, torch.zeros_like(policy_log_probs))
    if old_log_probs is not None:
        old_log_probs = torch.where(response_mask.bool(), old_log_probs, torch.zeros_like(old_log_probs))
    per_token, metadata = compute_policy_gradient_loss(
        inside, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    if normalize_constant is None:
        per_row = masked_sum(per_token, response_mask, -1) / response_mask.bool().sum(-1).clamp(min=1)
    else:
        per_row = masked_normalize(per_token, response_mask, -1, normalize_constant)
    loss = per_row.mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), {name: masked_mean(value, response_mask) for name, value in metadata.items()}
