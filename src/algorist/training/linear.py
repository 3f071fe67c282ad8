"""Linear layers of an update on the CPU: forward and both gradients through oneDNN where torch would take MKL.

On AMD processors MKL reaches 80 GFLOP/s of the 215 that oneDNN gets from one Zen 5 core in float32
(``rollouts/linear.py`` has the story). ``fast_linear()`` replaces ``F.linear`` inside it, for any module that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from algorist.errors import is_out_of_memory
from algorist.rollouts.linear import onednn_works

LEAST_ROWS, LEAST_WIDTH = 32, 8
"""Smaller products are left to torch: laying out the operands costs more than the product."""

KERNEL_ROOM = 32 << 20
"""Bytes that must be free before oneDNN compiles a kernel for a new shape."""
_compiled: set[tuple[Any, ...]] = set()


def row_bucket(rows: int) -> int:
    """Return the number of rows to run for ``rows``: eight sizes per octave.

    oneDNN compiles a kernel for each size (0.5 ms) and keeps 0.6 MB for it.
    """
    step = 1 << max(5, rows.bit_length() - 4)
    return -(-rows // step) * step


def times_transposed(left_MK: Tensor, right_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return ``left rightᵀ + bias`` (M, N), through oneDNN where it is the faster one."""
    if not _is_fast(left_MK, right_NK):
        return F.linear(left_MK, right_NK, bias_N)
    shape = (left_MK.shape[0], *right_NK.shape, left_MK.stride(), right_NK.stride())
    try:
        if shape not in _compiled:
            torch.empty(
                KERNEL_ROOM, dtype=torch.uint8
            )  # oneDNN can crash when there is no room for its kernel
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            left_MK, right_NK, bias_N, "none", [], ""
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return F.linear(left_MK, right_NK, bias_N)
    _compiled.add(shape)
    return product


def weight_gradient(slope_MO: Tensor, input_MI: Tensor) -> Tensor:
    """Return ``slopeᵀ input`` (O, I); oneDNN is faster with the smaller side first."""
    if slope_MO.shape[1] <= input_MI.shape[1]:
        return times_transposed(slope_MO.t(), input_MI.t())
    return times_transposed(input_MI.t(), slope_MO.t()).t().contiguous()


def _is_fast(left: Tensor, right: Tensor) -> bool:
    return (
        left.dtype == right.dtype == torch.float32
        and left.device.type == right.device.type == "cpu"
        and min(left.shape) >= LEAST_WIDTH
        and min(right.shape) >= LEAST_WIDTH
        and onednn_works(torch.float32)
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(input_MI, weight_OI)
        return times_transposed(input_MI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, slope_MO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            times_transposed(slope_MO, weight.t()) if needs_input else None,
            weight_gradient(slope_MO, inputs) if needs_weight else None,
            slope_MO.sum(0) if needs_bias else None,
        )


class _FastLinear(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and not kwargs and len(args) >= 2 and not torch.is_autocast_enabled("cpu"):
            inputs, weight, bias = args[0], args[1], args[2] if len(args) > 2 else None
            rows = inputs.reshape(-1, inputs.shape[-1])
            if rows.shape[0] >= LEAST_ROWS and weight.dim() == 2 and _is_fast(rows, weight):
                return _Linear.apply(rows, weight, bias).view(*inputs.shape[:-1], -1)
        return func(*args, **(kwargs or {}))


@contextmanager
def fast_linear() -> Iterator[None]:
    """Run every float32 ``F.linear`` on the CPU through oneDNN; nothing changes under autocast or on another device."""
    with _FastLinear() if onednn_works(torch.float32) else nullcontext():
        yield
