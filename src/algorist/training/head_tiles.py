"""The head on a GPU: tiles of logits, each folded into running sums of its positions; the backward pass computes them again.

Nothing of the size (N, V) is ever held, and the products' gradients are added up in float32: rounding each tile's to 16 bit would
bias training. Two kernels of Triton read a tile once each (``triton_head.py``); where Triton does not run, torch's operations below.
After TRL's ChunkedLogProbFunction (Apache 2.0), whose gradients and tiles these are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from algorist.models.precision import HALF
from algorist.models.products import why_no_triton

TILE_ROWS, TILE_COLUMNS = 4096, 32_768
"""Positions and entries of the vocabulary of a tile."""


class TiledHead(torch.autograd.Function):
    """Log-probs of the targets (N,), entropies (N,), and whether a target is the likeliest token (N,)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        inverse_temperature: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fold every tile into the sums of its positions (5, N): the largest logit, Σ e, Σ e·logit, the largest before the target, the target's."""
        sums_5N = torch.zeros(5, len(hidden_NH), dtype=torch.float32, device=hidden_NH.device)
        sums_5N[0] = sums_5N[3] = -torch.inf
        fold = _kernels(hidden_NH)[0]
        for rows, _, columns, tile in _tiles(hidden_NH, weight_VH, bias_V, dtype):
            fold(tile, targets_N[rows], sums_5N[:, rows], columns.start, inverse_temperature)
        most, total, weighted, before, target = sums_5N
        log_sum = most + total.log()
        entropy = log_sum - weighted / total
        is_top1 = (target >= most) & (target > before)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, log_sum, entropy)
        ctx.inverse_temperature, ctx.dtype = inverse_temperature, dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(is_top1)
        return target - log_sum, entropy, is_top1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, log_sum, entropy = ctx.saved_tensors
        needed = [
            torch.zeros_like(t, dtype=torch.float32) if needs else None
            for t, needs in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        ]
        grad_hidden, grad_weight, grad_bias = needed
        scales = [torch.zeros_like(log_sum) if grad is None else grad.float() for grad in grads[:2]]
        rows_4N = torch.stack([log_sum, entropy, *scales])
        to_slopes = _kernels(hidden)[1]
        with _whole(weight, bias):
            for rows, inputs, columns, tile in _tiles(hidden, weight, bias, ctx.dtype):
                to_slopes(tile, targets[rows], rows_4N[:, rows], columns.start, ctx.inverse_temperature)
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], tile, weight[columns].to(ctx.dtype))
                if grad_weight is not None:
                    _add_product(grad_weight[columns], tile.t(), inputs)
                if grad_bias is not None:
                    grad_bias[columns] += tile.sum(0, dtype=torch.float32)
        typed = (
            None if grad is None else grad.to(t.dtype)
            for grad, t in zip(needed, (hidden, weight, bias), strict=True)
        )
        return (*typed, None, None, None)


def _tiles(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor, slice, Tensor]]:
    """Yield positions, their hidden states, entries of the vocabulary, and the logits of both, which the next tile overwrites."""
    count, vocabulary = len(hidden_NH), len(weight_VH)
    space = hidden_NH.new_empty(min(TILE_ROWS, count), min(TILE_COLUMNS, vocabulary), dtype=dtype)
    for first in range(0, count, TILE_ROWS):
        rows = slice(first, min(first + TILE_ROWS, count))
        inputs = hidden_NH[rows].to(dtype)
        for start in range(0, vocabulary, TILE_COLUMNS):
            columns = slice(start, min(start + TILE_COLUMNS, vocabulary))
            tile = space[: rows.stop - rows.start, : columns.stop - columns.start]
            torch.mm(inputs, weight_VH[columns].to(dtype).t(), out=tile)
            if bias_V is not None:
                tile.add_(bias_V[columns].to(dtype))
            yield rows, inputs, columns, tile


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to a float32 sum without rounding it to the type of its factors."""
    if total.device.type == "cuda" and left.dtype in HALF:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


def _whole(*weights: Tensor | None) -> AbstractContextManager[Any]:
    """Gather weights that ZeRO-3 has partitioned again since the forward pass."""
    apart = [w for w in weights if getattr(getattr(w, "ds_status", None), "name", "") == "NOT_AVAILABLE"]
    if not apart:
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(apart)
    return gathered


def _kernels(hidden: Tensor) -> tuple[Any, Any]:
    if hidden.device.type == "cuda" and why_no_triton() is None:
        from algorist.training import triton_head

        return triton_head.fold, triton_head.to_slopes
    return _fold, _to_slopes


def _fold(tile_RC: Tensor, targets_R: Tensor, sums_5R: Tensor, first: int, inverse: float) -> None:
    most, total, weighted, before, target = sums_5R
    logits = tile_RC.float() * inverse
    local = targets_R - first
    columns = torch.arange(logits.shape[1], device=logits.device)
    before.copy_(before.maximum(logits.masked_fill(columns >= local[:, None], -torch.inf).amax(1)))
    larger = most.maximum(logits.amax(1))
    shares, rescale = (logits - larger[:, None]).exp_(), (most - larger).exp_()
    total.mul_(rescale).add_(shares.sum(1))
    weighted.mul_(rescale).add_((shares * logits).sum(1))
    most.copy_(larger)
    inside = (local >= 0) & (local < len(columns))
    value = logits.gather(1, local.clamp(0, len(columns) - 1)[:, None]).squeeze(1)
    target.copy_(value.where(inside, target))


def _to_slopes(tile_RC: Tensor, targets_R: Tensor, rows_4R: Tensor, first: int, inverse: float) -> None:
    log_sum, entropy, scale, scale_entropy = rows_4R[..., None]
    log_probs = tile_RC.float() * inverse - log_sum
    probs = log_probs.exp()
    columns = torch.arange(first, first + tile_RC.shape[1], device=tile_RC.device)
    slopes = scale * ((columns == targets_R[:, None]).float() - probs)
    slopes -= scale_entropy * probs * (log_probs + entropy)
    tile_RC.copy_(slopes * inverse)
