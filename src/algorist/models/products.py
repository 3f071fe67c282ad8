"""Matrix products on the CPU, through the library that is fastest on this processor.

``torch``: ``F.linear``, which calls MKL for float32. ``mkl``: MKL with weights laid out beforehand, for decoding only. ``onednn``:
oneDNN, with weights laid out beforehand for decoding. On one Zen 5 core MKL reaches a third of the speed of oneDNN (80 against 215
to 250 GFLOP/s); on one core of an Intel Xeon with AVX-512, 32 rows, plain MKL 44 to 65, oneDNN 52 to 78, MKL laid out 65 to 108.
Each is reached through the operators that torch's own compiler uses. They are timed once per process, for decoding (few rows) and
for updates (many rows, forward and both gradients). They round differently, so the choice has a margin, to be the same in every
process of a machine, and a run keeps it; ``ALGORIST_CPU_PRODUCTS`` set to one of the names makes it by hand.
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

log = logging.getLogger("algorist.models.products")

Kind = Literal["decode", "update"]
Library = Literal["torch", "mkl", "onednn"]
Linear = Callable[[Tensor], Tensor]
LinearAdd = Callable[[Tensor, Tensor], Tensor]
BY_HAND = "ALGORIST_CPU_PRODUCTS"
MARGIN = 1.3
"""oneDNN is taken when MKL takes this many times as long: 2.5 on AMD's, 0.8 on Intel's processors."""
_SHAPES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "decode": ((32, 512, 1536), (32, 512, 768), (16, 768, 512)),
    "update": ((256, 512, 512),),
}
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


@cache
def mkl_works(dtype: torch.dtype) -> bool:
    """Return whether MKL's linear operator with a laid-out weight is there and right for other numbers of rows than laid out for."""
    if dtype != torch.float32 or not torch.backends.mkl.is_available():
        return False
    draw = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(40, 24, generator=draw), torch.randn(40, generator=draw)
    try:
        product = _mkl(weight, bias, 32)[0]
        inputs = [torch.randn(rows, 24, generator=draw) for rows in (1, 2, 7, 32, 100)]
        return all(torch.allclose(product(x), F.linear(x, weight, bias), atol=1e-4) for x in inputs)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


_chosen: dict[str, Library] = {}


def choices() -> dict[str, Library]:
    """Return the library of each kind of product in this process: what a run keeps, so that it continues to the bit."""
    types = (torch.float32, torch.bfloat16)
    return {f"{kind} {dtype}": library(kind, dtype) for kind in ("decode", "update") for dtype in types}  # type: ignore[arg-type]


def choose(chosen: Mapping[str, Library | bool]) -> None:
    """Take the choices of another process instead of this one's own timing; older runs kept whether it was oneDNN."""
    names: dict[bool, Library] = {True: "onednn", False: "torch"}
    _chosen.update({kind: names[name] if isinstance(name, bool) else name for kind, name in chosen.items()})


def library(kind: Kind, dtype: torch.dtype) -> Library:
    """Return the library for products of this kind on this processor; the first call takes some milliseconds."""
    name = _chosen.get(f"{kind} {dtype}") or _fastest(kind, dtype)
    works = {"torch": True, "mkl": mkl_works(dtype), "onednn": onednn_works(dtype)}
    return name if works[name] else "torch"


@cache
def _fastest(kind: Kind, dtype: torch.dtype) -> Library:
    own: Library = "mkl" if kind == "decode" and mkl_works(dtype) else "torch"
    by_hand = os.environ.get(BY_HAND)
    if by_hand in ("torch", "onednn"):
        return by_hand  # type: ignore[return-value]
    if by_hand == "mkl" or not onednn_works(dtype):
        return own
    if kind == "decode" and dtype == torch.bfloat16:
        return "onednn"  # torch calls it too, and lays the weight out again for every product
    draw, totals = torch.Generator().manual_seed(0), [0.0, 0.0]
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for rows, width, out in _SHAPES[kind]:
            inputs, weight = (torch.randn(n, width, generator=draw).to(dtype) for n in (rows, out))
            plain = _mkl(weight, None, rows)[0] if own == "mkl" else lambda x, w=weight: F.linear(x, w)
            laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, rows) if kind == "decode" else weight

            def onednn(x: Tensor, w: Tensor = laid_out) -> Tensor:
                return torch.ops.mkldnn._linear_pointwise.default(x, w, None, "none", [], "")

            totals = [total + s for total, s in zip(totals, _seconds(inputs, plain, onednn), strict=True)]
    ratio = totals[0] / totals[1]
    log.info("%s, %s: oneDNN has %.2f times the speed of %s", kind, dtype, ratio, own)
    return "onednn" if ratio > MARGIN else own


def _seconds(inputs: Tensor, *ways: Linear) -> list[float]:
    """Return the least time of each way, in turns."""
    seconds = [float("inf")] * len(ways)
    for turn in range(_REPEATS + 1):
        for way, product in enumerate(ways):
            began = time.perf_counter()
            product(inputs)
            if turn:  # the first one compiles
                seconds[way] = min(seconds[way], time.perf_counter() - began)
    return seconds


def fixed_linear(weight: Tensor, bias: Tensor | None, rows: int) -> tuple[Linear, LinearAdd]:
    """Return ``x → x Wᵀ + b`` and ``(x, r) → r + x Wᵀ + b`` for a weight that does not change meanwhile.

    Args:
        weight: (out, in), any device.
        bias: (out,) or None.
        rows: Usual number of rows of x; a layout for very few rows is not worth its copy.
    """
    if weight.device.type == "cpu" and rows >= 4:
        name = library("decode", weight.dtype)
        if name != "torch":
            return (_onednn if name == "onednn" else _mkl)(weight, bias, rows)

    return _with_add(lambda x: F.linear(x, weight, bias))


def _with_add(product: Linear) -> tuple[Linear, LinearAdd]:
    return product, lambda x, residual: product(x).add_(residual)


def _mkl(weight: Tensor, bias: Tensor | None, rows: int) -> tuple[Linear, LinearAdd]:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), rows)
    linear = torch.ops.mkl._mkl_linear.default
    shape = weight.new_empty(()).expand(weight.shape)  # only its sizes are read: the weight itself may go
    return _with_add(lambda x: linear(x, packed, shape, bias, x.shape[0]))


def _onednn(weight: Tensor, bias: Tensor | None, rows: int) -> tuple[Linear, LinearAdd]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
    pointwise = torch.ops.mkldnn._linear_pointwise
    product, product_add = pointwise.default, pointwise.binary
    return (
        lambda x: product(x, packed, bias, "none", [], ""),
        lambda x, residual: product_add(x, residual, packed, bias, "add"),
    )


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
            # oneDNN can crash when there is no room for its kernel
            torch.empty(KERNEL_ROOM, dtype=torch.uint8)
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
        and library("update", torch.float32) == "onednn"
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
    with _FastLinear() if library("update", torch.float32) == "onednn" else nullcontext():
        yield
