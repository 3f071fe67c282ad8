"""Matrix products on the CPU, through oneDNN where it is clearly faster than what torch calls.

For float32 torch calls MKL, which on AMD processors reaches a third of the speed of oneDNN (80 against 215 to 250 GFLOP/s on one
Zen 5 core) and on Intel processors a little more than it. Both are timed once per process, for decoding (few rows, weights laid
out beforehand) and for updates (many rows, forward and both gradients); oneDNN is reached through the operators that torch's own
compiler uses. The two round differently, so the choice has a margin, to be the same in every process of a machine;
``ALGORIST_CPU_PRODUCTS=onednn`` or ``torch`` makes it by hand.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from algorist.errors import is_out_of_memory

log = logging.getLogger("algorist.models.onednn")

Linear = Callable[[Tensor], Tensor]
LinearAdd = Callable[[Tensor, Tensor], Tensor]
BY_HAND = "ALGORIST_CPU_PRODUCTS"
MARGIN = 1.3
"""oneDNN is taken when torch's product takes this many times as long: 2.5 on AMD's, 0.8 to 1.2 on Intel's processors."""
_SHAPES = {"decode": (32, 512, 1536), "update": (256, 512, 512)}
_REPEATS = 5

LEAST_ROWS, LEAST_WIDTH = 32, 8
"""Smaller products of an update are left to torch: laying out the operands costs more than the product."""
KERNEL_ROOM = 32 << 20
"""Bytes that must be free before oneDNN compiles a kernel for a new shape."""
_compiled: set[tuple[Any, ...]] = set()


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


_chosen: dict[str, bool] = {}


def choices() -> dict[str, bool]:
    """Return which products of this process go through oneDNN: what a run keeps, so that it continues to the bit."""
    types = (torch.float32, torch.bfloat16)
    return {f"{kind} {dtype}": onednn_is_faster(kind, dtype) for kind in _SHAPES for dtype in types}  # type: ignore[arg-type]


def choose(chosen: Mapping[str, bool]) -> None:
    """Take the choices of another process instead of this one's own timing."""
    _chosen.update(chosen)


def onednn_is_faster(kind: Literal["decode", "update"], dtype: torch.dtype) -> bool:
    """Return whether oneDNN is clearly faster on this processor; the first call takes some milliseconds."""
    name = f"{kind} {dtype}"
    return onednn_works(dtype) and (_chosen[name] if name in _chosen else _is_faster(kind, dtype))


@cache
def _is_faster(kind: Literal["decode", "update"], dtype: torch.dtype) -> bool:
    if os.environ.get(BY_HAND) in ("onednn", "torch"):
        return os.environ[BY_HAND] == "onednn"
    (rows, width, out), draw = _SHAPES[kind], torch.Generator().manual_seed(0)
    inputs, weight = (torch.randn(n, width, generator=draw).to(dtype) for n in (rows, out))
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, rows) if kind == "decode" else weight
    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: F.linear(inputs, weight),
        lambda: torch.ops.mkldnn._linear_pointwise.default(inputs, laid_out, None, "none", [], ""),
    )
    seconds = [float("inf")] * len(ways)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for turn in range(_REPEATS + 1):
            for way, product in enumerate(ways):
                began = time.perf_counter()
                product()
                if turn:  # the first one compiles
                    seconds[way] = min(seconds[way], time.perf_counter() - began)
    ratio = seconds[0] / seconds[1]
    log.info("%s, %s: oneDNN has %.2f times the speed of torch's product", kind, dtype, ratio)
    return ratio > MARGIN


def fixed_linear(weight: Tensor, bias: Tensor | None, rows: int) -> tuple[Linear, LinearAdd]:
    """Return ``x → x Wᵀ + b`` and ``(x, r) → r + x Wᵀ + b`` for a weight that does not change meanwhile.

    Args:
        weight: (out, in), any device.
        bias: (out,) or None.
        rows: Usual number of rows of x; a layout for very few rows is not worth its copy.
    """
    if weight.device.type == "cpu" and rows >= 4 and onednn_is_faster("decode", weight.dtype):
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
        and onednn_is_faster("update", torch.float32)
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
    """Run every float32 ``F.linear`` on the CPU through oneDNN where it is faster; nothing changes under autocast or elsewhere."""
    with _FastLinear() if onednn_is_faster("update", torch.float32) else nullcontext():
        yield
