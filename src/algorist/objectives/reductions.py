"""Reductions of a per-token loss to a scalar: the weight of each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor

Reduction = Literal[
    "token-mean",
    "micro-batch-token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean-token-mean",
]


def token_weights(
    mask: Tensor,
    reduction: Reduction,
    *,
    denominator: float | Tensor | None = None,
    like: Tensor | None = None,
) -> Tensor:
    """Return the weights (B, T) whose sum with the loss per token is the number that is minimised.

    =========================  ==============================================  ==========================================
    reduction                  value                                           over parts and ranks
    =========================  ==============================================  ==========================================
    token-mean                 Σ tokens / denominator                          parts add up; with R ranks that average
                                                                               gradients, divide the denominator by R
    micro-batch-token-mean     mean over micro-batches of Σ tokens / their     each micro-batch has weights of its own,
                               number                                          divided by the number of micro-batches
    seq-mean-token-mean        mean over completions of their mean             parts add up; B of one rank
    seq-mean-token-sum         mean over completions of their sum              parts add up; B of one rank
    seq-mean-token-sum-norm    the same / denominator, the longest possible    parts add up; B of one rank
                               completion
    prompt-mean-token-mean     mean over prompts of Σ tokens / their number    parts add up; B of one rank
    =========================  ==============================================  ==========================================

    Args:
        mask: (B, T), true for the tokens that count.
        reduction: See the table.
        denominator: For ``token-mean`` (default: the tokens of ``mask``), ``seq-mean-token-sum-norm`` (required) and
            ``prompt-mean-token-mean`` (required: ``masks.mean_lengths``).
        like: The weights get its type; float32 when left out.

    Source: GRPO (2402.03300) eq. 3 seq-mean-token-mean, DAPO (2503.14476) eq. 8 token-mean, Dr. GRPO (2503.20783) section 3.2
    seq-mean-token-sum-norm, ScaleRL (2510.13786) section 4 prompt-mean-token-mean.

    Returns:
        (B, T), 0 outside the mask. B is the number of completions of an optimiser step on this rank, those without tokens
        included.
    """
    ones = mask.bool().float() if like is None else mask.bool().to(like.dtype)
    count = mask.shape[0]
    if reduction == "token-mean":
        return ones / (ones.sum().clamp(min=1) if denominator is None else denominator)
    if reduction == "micro-batch-token-mean":
        return ones / ones.sum().clamp(min=1)
    if reduction == "seq-mean-token-mean":
        return ones / (ones.sum(-1, keepdim=True).clamp(min=1) * count)
    if reduction == "seq-mean-token-sum":
        return ones / count
    if reduction in ("seq-mean-token-sum-norm", "prompt-mean-token-mean"):
        if denominator is None:
            what = (
                "the mean length of the completions of each one's prompt, objectives.mean_lengths(mask.sum(1), group_size)"
                if reduction == "prompt-mean-token-mean"
                else "the longest possible completion in tokens"
            )
            raise ValueError(f"reduction '{reduction}' needs denominator, {what}")
        return ones / (count * denominator)
    raise ValueError(f"unknown reduction '{reduction}'; expected one of {', '.join(get_args(Reduction))}")
