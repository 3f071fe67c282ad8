"""Sums and means over the tokens that count."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def masked_sum(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum the elements where the mask is true; what the others hold, NaN included, has no influence.

    Args:
        tensor: Values, any shape.
        mask: Same shape, 1 or True for the elements that count.
        dim: Dimension to sum over; None sums over all.

    Returns:
        The sums: the shape of ``tensor`` without ``dim``, or a scalar. An empty selection sums to 0.
    """
    masked = tensor.masked_fill(~mask.bool(), 0.0)
    return masked.sum() if dim is None else masked.sum(dim)


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average the elements where the mask is true.

    Args:
        tensor: Values, any shape.
        mask: Same shape, 1 or True for the elements that count.
        dim: Dimension to average over; None averages over all.

    Returns:
        The means: the shape of ``tensor`` without ``dim``, or a scalar. NaN where the mask selects nothing.
    """
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(tensor, mask, dim) / count


def masked_normalize(
    tensor: Tensor, mask: Tensor, dim: int | None = None, normalize_constant: float = 1.0
) -> Tensor:
    """Sum the elements where the mask is true and divide by a constant.

    Args:
        tensor: Values, any shape.
        mask: Same shape, 1 or True for the elements that count.
        dim: Dimension to sum over; None sums over all.
        normalize_constant: The divisor, for example the longest possible completion.

    Returns:
        The shape of ``tensor`` without ``dim``, or a scalar.
    """
    return masked_sum(tensor, mask, dim) / normalize_constant


def top_entropy_mask(entropy: Tensor, mask: Tensor, among: Tensor, share: float) -> Tensor:
    """Select the ``share`` of tokens with the highest entropy: the forking tokens.

    Args:
        entropy: (B, T) of the next-token distributions.
        mask: (B, T), true for the tokens that count.
        among: (N,), the entropies of all tokens that are compared, those of other processes included.
        share: In (0, 1].

    Returns:
        (B, T) bool, false outside the mask; all false when ``among`` is empty.

    Source: 2506.01939 section 5; as TRL's ``top_entropy_quantile``.
    """
    if not among.numel():
        return mask.bool() & False
    return mask.bool() & (entropy >= among.float().quantile(1 - share))


def mean_lengths(lengths: Tensor, group_size: int) -> Tensor:
    """Return for each completion the mean length of the completions of its prompt, at least 1 / ``group_size``.

    Args:
        lengths: (B,), tokens that count, the completions of a prompt together.
        group_size: Completions of a prompt.

    Returns:
        (B, 1) float32: the ``denominator`` of the reduction ``prompt-mean-token-mean``.
    """
    means = lengths.reshape(-1, group_size).float().mean(1).clamp(min=1 / group_size)
    return means.repeat_interleave(group_size)[:, None]
