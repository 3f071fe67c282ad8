"""Policy-gradient losses: per token, and reduced to the number that is minimised.

Tensors are (B, T): B completions, T completion positions; ``mask`` is 1 for the tokens that count (padding, and
tokens the policy did not write, are 0). Advantages are (B,), (B, 1) or (B, T). A loss is minimised, hence the minus.
``policy_loss`` agrees with TRL 1.16's ``GRPOTrainer._compute_loss``, value and gradient.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from algorist.objectives.kl import k3
from algorist.objectives.masks import masked_mean, masked_sum
from algorist.objectives.ratios import log_ratio, sequence_ratio, token_ratio

BasicLoss = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip"]
LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo", "sapo", "luspo"]


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


def policy_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: LossType = "dapo",
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    beta: float = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float | None = None,
    ratio_cap: float = 5.0,
    temperatures: tuple[float, float] = (1.0, 1.05),
    importance: Literal["token", "sequence"] = "token",
    denominator: float | Tensor | None = None,
) -> Tensor:
    """Return the loss of a micro-batch.

    Args:
        log_probs: (B, T) under the policy, with gradient.
        advantages: (B,), (B, 1) or (B, T).
        mask: (B, T), 1 for the tokens that count.
        loss_type: ``grpo``, ``bnpo``, ``dr_grpo``, ``dapo``, ``luspo``: clipped ratio, they differ in the reduction
            (``reduce_loss``). ``cispo``: capped ratio as a weight on REINFORCE, reduced as ``dapo``. ``gspo``:
            ``grpo`` with the ratio of sequences. ``sapo``: a sigmoid instead of the clip, reduced as ``grpo``.
        old_log_probs: (B, T) under the policy that sampled; None means exactly on-policy (ratio 1, with gradient).
        ref_log_probs: (B, T) under the reference, needed when ``beta`` is not 0.
        beta: Weight of the k3 penalty, added per token.
        clip_low: Ratios below 1 - this are clipped.
        clip_high: Ratios above 1 + this are clipped.
        delta: Also caps the unclipped ratio (two-sided clipping, INTELLECT-2); above 1 + ``clip_high``.
        ratio_cap: Greatest weight in ``cispo``, an absolute value (TRL passes it as ``epsilon_high``).
        temperatures: Of ``sapo``, for positive and for other advantages.
        importance: One ratio per token, or one per sequence.
        denominator: What the sum is divided by, see ``reduce_loss``.

    Returns:
        A scalar. Masked positions have no influence, whatever they hold; a batch without tokens gives 0.

    Raises:
        ValueError: Unknown kind, or ``beta`` without ``ref_log_probs``, or a missing denominator.

    Source: GRPO (2402.03300), Dr. GRPO (2503.20783), DAPO (2503.14476), CISPO (2506.13585), GSPO (2507.18071).
    """
    if loss_type not in get_args(LossType):
        raise ValueError(f"unknown loss_type '{loss_type}'; expected one of {', '.join(get_args(LossType))}")
    if beta and ref_log_probs is None:
        raise ValueError(f"beta is {beta} and ref_log_probs is missing; pass them, or set beta=0")
    zero = torch.zeros_like(log_probs)
    log_probs = torch.where(mask.bool(), log_probs, zero)  # a NaN in the padding must not reach the gradient
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    if importance == "sequence" or loss_type == "gspo":
        ratio = sequence_ratio(log_probs, old, mask)
    else:
        ratio = token_ratio(log_probs, old, mask)
    column = _column(advantages)
    if loss_type == "cispo":
        per_token = -ratio.clamp(max=ratio_cap).detach() * column * log_probs
    elif loss_type == "sapo":
        heat = torch.where(column > 0, temperatures[0], temperatures[1])
        per_token = -torch.sigmoid(heat * (ratio - 1)) * 4 / heat * column
    else:
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * column
        free = (ratio if delta is None else ratio.clamp(max=delta)) * column
        per_token = -torch.minimum(free, clipped)
    if beta and ref_log_probs is not None:
        reference = torch.where(mask.bool(), ref_log_probs, zero)
        per_token = per_token + beta * k3(log_probs, reference)
    return reduce_loss(per_token.expand_as(log_probs), mask, loss_type, denominator)


def reduce_loss(
    per_token: Tensor, mask: Tensor, loss_type: LossType, denominator: float | Tensor | None = None
) -> Tensor:
    """Reduce a per-token loss (B, T) to the scalar of a micro-batch.

    ==================  ============================================  =============================================
    loss type           value                                         with micro-batches and ranks
    ==================  ============================================  =============================================
    grpo, gspo, sapo    mean over rows of the mean over tokens        divide by the number of micro-batches; exact
                                                                      for micro-batches of equal B
    bnpo                mean over the tokens of this micro-batch      divide likewise; depends on the split
    dr_grpo             sum over tokens / (B · denominator), the      divide likewise; exact for equal B
                        longest possible completion
    luspo               mean over rows of the sum over tokens         divide likewise; exact for equal B
    dapo, cispo         sum over tokens / denominator, the number of  just add: exact for any split; with several
                        tokens of the whole optimiser step            ranks that average gradients, divide the
                                                                      denominator by their number
    ==================  ============================================  =============================================

    Args:
        per_token: (B, T).
        mask: (B, T).
        loss_type: See the table.
        denominator: For ``dr_grpo`` (required) and ``dapo``, ``cispo`` (default: the tokens of this micro-batch).

    Returns:
        A scalar. Rows without tokens add 0 and are counted in B; no tokens at all give 0.
    """
    if loss_type in ("grpo", "gspo", "sapo"):
        return (masked_sum(per_token, mask, dim=-1) / mask.sum(-1).clamp(min=1)).mean()
    if loss_type == "luspo":
        return masked_sum(per_token, mask, dim=-1).mean()
    if loss_type == "bnpo":
        return masked_sum(per_token, mask) / mask.sum().clamp(min=1)
    if loss_type == "dr_grpo":
        if denominator is None:
            raise ValueError(
                "loss_type 'dr_grpo' needs denominator, the longest possible completion in tokens"
            )
        return masked_sum(per_token, mask) / (per_token.shape[0] * denominator)
    tokens = mask.sum() if denominator is None else torch.as_tensor(denominator, device=per_token.device)
    return masked_sum(per_token, mask) / tokens.clamp(min=1)


def clip_fractions(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> dict[str, Tensor]:
    """Return which share of the tokens the clip silences: ``clip/low``, ``clip/high``, ``clip/region``; scalars.

    Low counts ratios below 1 - ``clip_low`` with a negative advantage, high those above 1 + ``clip_high`` with a
    positive one. NaN when the mask is empty.
    """
    ratio = torch.exp(log_ratio(log_probs, old_log_probs, mask)).detach()
    low = (ratio < 1 - clip_low) & (_column(advantages) < 0)
    high = (ratio > 1 + clip_high) & (_column(advantages) > 0)
    shares = {"clip/low": low, "clip/high": high, "clip/region": low | high}
    return {name: masked_mean(value.float(), mask) for name, value in shares.items()}
