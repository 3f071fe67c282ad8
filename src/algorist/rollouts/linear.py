"""Matrix products with fixed weights, as fast as the processor allows.

For float32 torch calls MKL, which on AMD processors reaches a third of the speed of oneDNN (measured: 80 against
250 GFLOP/s on one Zen 5 core). oneDNN is reached through the operators that torch's own compiler uses, with the weights
laid out once per ``generate`` call. Where these operators are missing, ``torch.nn.functional.linear`` does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
LinearAdd = Callable[[Tensor, Tensor], Tensor]


@cache
def onednn_works(dtype: torch.dtype) -> bool:
    """Return whether oneDNN's linear operators are there and agree with ``F.linear``."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    try:
        x, weight, bias = (
            torch.ones(3, 8, dtype=dtype),
            torch.full((4, 8), 0.5, dtype=dtype),
            torch.ones(4, dtype=dtype),
        )
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 3)
        plain = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        added = torch.ops.mkldnn._linear_pointwise.binary(x, plain, packed, None, "add")
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool((plain == 5).all()) and bool((added == 9).all())


def fixed_linear(weight: Tensor, bias: Tensor | None, rows: int) -> tuple[Linear, LinearAdd]:
    """Return ``x → x Wᵀ + b`` and ``(x, r) → r + x Wᵀ + b`` for a weight that does not change meanwhile.

    Args:
        weight: (out, in), any device.
        bias: (out,) or None.
        rows: Usual number of rows of x; a layout for very few rows is not worth its copy.
    """
    if weight.device.type == "cpu" and rows >= 4 and onednn_works(weight.dtype):
        return _onednn(weight, bias, rows)

    def plain(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    def plain_add(x: Tensor, residual: Tensor) -> Tensor:
        return F.linear(x, weight, bias).add_(residual)

    return plain, plain_add


def _onednn(weight: Tensor, bias: Tensor | None, rows: int) -> tuple[Linear, LinearAdd]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
    pointwise = torch.ops.mkldnn._linear_pointwise.default
    pointwise_binary = torch.ops.mkldnn._linear_pointwise.binary

    def fast(x: Tensor) -> Tensor:
        return pointwise(x, packed, bias, "none", [], "")

    def fast_add(x: Tensor, residual: Tensor) -> Tensor:
        return pointwise_binary(x, residual, packed, bias, "add")

    return fast, fast_add


def bucket(rows: int) -> int:
    """Return the batch size to run for ``rows``: few distinct sizes, as oneDNN compiles a kernel for each (2 ms)."""
    if rows <= 8:
        return 1 << max(0, rows - 1).bit_length()
    step = 8 if rows <= 64 else 16
    return -(-rows // step) * step
