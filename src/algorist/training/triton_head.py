"""The head's tiles on a GPU, in Triton: a tile of logits folded into running sums, and turned into its gradient. ``head_tiles.py`` has
the plain twins and says what the numbers are."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Logits that a program holds."""


@triton.jit  # type: ignore[misc]
def _fold_kernel(  # type: ignore[no-untyped-def]
    tile_ptr, tile_stride, targets_ptr, sums_ptr, sums_stride, first, columns, inverse, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile_ptr += row * tile_stride
    sums_ptr += row
    target = tl.load(targets_ptr + row) - first
    most, total, weighted = (
        tl.load(sums_ptr),
        tl.load(sums_ptr + sums_stride),
        tl.load(sums_ptr + 2 * sums_stride),
    )
    before = tl.load(sums_ptr + 3 * sums_stride)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        logits = tl.load(tile_ptr + at, mask=inside, other=0.0).to(tl.float32) * inverse
        known = tl.where(inside, logits, -float("inf"))
        before = tl.maximum(before, tl.max(tl.where(at < target, known, -float("inf")), axis=0))
        larger = tl.maximum(most, tl.max(known, axis=0))
        shares = tl.exp(known - larger)
        rescale = tl.exp(most - larger)
        total = total * rescale + tl.sum(shares, axis=0)
        weighted = weighted * rescale + tl.sum(shares * logits, axis=0)
        most = larger
    tl.store(sums_ptr, most)
    tl.store(sums_ptr + sums_stride, total)
    tl.store(sums_ptr + 2 * sums_stride, weighted)
    tl.store(sums_ptr + 3 * sums_stride, before)
    if (target >= 0) & (target < columns):
        tl.store(sums_ptr + 4 * sums_stride, tl.load(tile_ptr + target).to(tl.float32) * inverse)


@triton.jit  # type: ignore[misc]
def _slope_kernel(  # type: ignore[no-untyped-def]
    tile_ptr, tile_stride, targets_ptr, rows_ptr, rows_stride, first, columns, inverse, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    place = tile_ptr + row * tile_stride + at
    rows_ptr += row
    log_sum, entropy = tl.load(rows_ptr), tl.load(rows_ptr + rows_stride)
    scale, scale_entropy = tl.load(rows_ptr + 2 * rows_stride), tl.load(rows_ptr + 3 * rows_stride)
    log_probs = tl.load(place, mask=inside, other=0.0).to(tl.float32) * inverse - log_sum
    probs = tl.exp(log_probs)
    is_target = (at + first == tl.load(targets_ptr + row)).to(tl.float32)
    slope = scale * (is_target - probs) - scale_entropy * probs * (log_probs + entropy)
    tl.store(place, (slope * inverse).to(tile_ptr.dtype.element_ty), mask=inside)


def fold(tile_RC: Tensor, targets_R: Tensor, sums_5R: Tensor, first: int, inverse: float) -> None:
    rows, columns = tile_RC.shape
    _fold_kernel[(rows,)](
        tile_RC, tile_RC.stride(0), targets_R, sums_5R, sums_5R.stride(0), first, columns, inverse, BLOCK=BLOCK
    )  # fmt: skip


def to_slopes(tile_RC: Tensor, targets_R: Tensor, rows_4R: Tensor, first: int, inverse: float) -> None:
    rows, columns = tile_RC.shape
    _slope_kernel[(rows, triton.cdiv(columns, BLOCK))](
        tile_RC, tile_RC.stride(0), targets_R, rows_4R, rows_4R.stride(0), first, columns, inverse, BLOCK=BLOCK
    )  # fmt: skip
