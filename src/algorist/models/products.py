"""Matrix products on the CPU, through the library that suits this processor.

``torch``: ``F.linear``, which calls MKL for float32. ``mkl``: MKL with weights laid out beforehand, for decoding only. ``onednn``:
oneDNN, with weights laid out beforehand for decoding. On one Zen 5 core MKL reaches a third of the speed of oneDNN (80 against 215
to 250 GFLOP/s); on one core of an Intel Xeon with AVX-512, 32 rows, plain MKL 44 to 65, oneDNN 52 to 78, MKL laid out 65 to 108.
Each is reached through the operators that torch's own compiler uses. They round differently, so the choice is a rule over the
processor and never a timing: the same command and seed is the same run in every process and on every machine with that processor.
AMD's with AVX-512 take oneDNN, as MKL has AVX-512 code for Intel's only; all others take MKL, but for decoding with large weights on
AMD's with AVX2 (Zen 3, 8 to 64 rows: oneDNN 1.06 to 1.8 times as fast with 0.9 million weights and more, 0.66 to 0.83 times with 0.1
million). A run keeps its choice; ``ALGORIST_CPU_PRODUCTS`` set to one of the names makes it by hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from algorist.errors import CheckpointError, is_out_of_memory
from algorist.system import cpuinfo, has_bfloat16

Kind = Literal["decode", "decode large", "update"]
Library = Literal["torch", "mkl", "onednn"]
Linear = Callable[[Tensor], Tensor]
LinearAdd = Callable[[Tensor, Tensor], Tensor]
BY_HAND = "ALGORIST_CPU_PRODUCTS"
WIDE = 256
"""Width of a model from which bfloat16 products pay where the processor has units for them: on an Intel Xeon with AMX sampling was 0.69 to
0.96 times as fast in models of 96 to 192, 1.3 times at 256, and the update 0.93, 0.97, 1.39 and 1.24 times."""
LARGE = 1 << 19
"""Elements of a weight from which decoding on AMD's AVX2 is faster through oneDNN."""
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
        x, weight = torch.ones(3, 8, dtype=dtype), torch.full((4, 8), 0.5, dtype=dtype)
        bias = torch.ones(4, dtype=dtype)
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


_chosen: dict[str, str] = {}
WIDE_TYPE = "type of a wide model"


def choices() -> dict[str, str]:
    """Return the library of each kind of product in this process, and a wide model's type: what a run keeps, so that it continues to the bit."""
    types = (torch.float32, torch.bfloat16)
    libraries: dict[str, str] = {f"{kind} {t}": library(kind, t) for kind in get_args(Kind) for t in types}
    return libraries | {WIDE_TYPE: str(wide_dtype()).removeprefix("torch.")}


def wide_dtype() -> torch.dtype:
    """Return the type of the products of a model of at least ``WIDE``: that which this processor, or the run's first one, has units for."""
    name = _chosen.get(WIDE_TYPE) or ("bfloat16" if has_bfloat16() else "float32")
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def choose(libraries: Mapping[str, str]) -> None:
    """Take the choices that a run keeps, or another process made, instead of this one's own.

    Raises:
        CheckpointError: One of them is no library.
    """
    names = {*Library.__args__, "float32", "bfloat16"}  # type: ignore[attr-defined]
    if not isinstance(libraries, dict) or not set(libraries.values()) <= names:
        raise CheckpointError(
            f"products.json of the run holds {str(libraries)[:200]}; expected one of {', '.join(Library.__args__)} "  # type: ignore[attr-defined]
            "for each kind of product. Delete it: the run continues with this processor's own"
        )
    _chosen.update(libraries)


def library(kind: Kind, dtype: torch.dtype) -> Library:
    """Return the library for products of this kind on this processor."""
    name: Any = _chosen.get(f"{kind} {dtype}") or _usual(kind, dtype)
    works = {"torch": True, "mkl": mkl_works(dtype), "onednn": onednn_works(dtype)}
    return name if works[name] else "torch"


@cache
def _usual(kind: Kind, dtype: torch.dtype) -> Library:
    own: Library = "mkl" if kind != "update" and mkl_works(dtype) else "torch"
    by_hand = os.environ.get(BY_HAND)
    if by_hand in ("torch", "onednn"):
        return by_hand  # type: ignore[return-value]
    if by_hand == "mkl" or not onednn_works(dtype):
        return own
    # Of bfloat16, torch calls oneDNN too, and lays the weight out again for every product.
    laid_out_anew = kind != "update" and dtype == torch.bfloat16
    # MKL leaves the AVX-512 of AMD's processors unused.
    faster = torch.backends.cpu.get_cpu_capability() == "AVX512" or kind == "decode large"
    return "onednn" if laid_out_anew or (faster and "AuthenticAMD" in cpuinfo()) else own


def fixed_linear(weight: Tensor, bias: Tensor | None, rows: int) -> tuple[Linear, LinearAdd]:
    """Return ``x → x Wᵀ + b`` and ``(x, r) → r + x Wᵀ + b`` for a weight that does not change meanwhile.

    Args:
        weight: (out, in), any device.
        bias: (out,) or None.
        rows: Usual number of rows of x; a layout for very few rows is not worth its copy.
    """
    if weight.device.type == "cpu" and rows >= 4:
        name = library("decode large" if weight.numel() >= LARGE else "decode", weight.dtype)
        if name != "torch":
            return (_onednn if name == "onednn" else _mkl)(weight, bias, rows)

    if weight.device.type == "cpu" or bias is not None:
        return _with_add(lambda x: F.linear(x, weight, bias))
    turned = weight.t()  # on a GPU the product's kernel adds, before it rounds
    return lambda x: F.linear(x, weight), lambda x, residual: residual.addmm_(x, turned)


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
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


# ---- whether Triton's kernels can be compiled and started on this machine; its wheel alone is not enough

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
else:

    @triton.jit
    def _one_kernel(place):  # type: ignore[no-untyped-def]
        tl.store(place, 1)


@cache
def why_no_triton() -> str | None:
    """Return the reason against Triton in one line, or None: a tiny kernel is tried once, which needs a C compiler and Python's headers."""
    if triton is None:
        return "the package triton is not installed"
    try:
        _one_kernel[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
    except Exception as error:  # of the compiler, the linker or the driver, as each likes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"{reason} (Triton builds its starter with a C compiler: apt install gcc python3-dev)"
    return None
