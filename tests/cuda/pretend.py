"""A pretend GPU on a CPU build of torch: real numbers, device labels, errors on mixing, counts of launches and syncs.

A tensor of the device is a wrapper around a CPU tensor that says it lies on ``pretend:0``. Factories, copies and
``.to`` are routed; an operation that mixes devices raises as CUDA's would; autocast casts what CUDA's casts; the
kernels that exist on CUDA only are computed plainly, in float32, with CUDA's shapes and layouts. A device of shapes only
(``pretend_gpu(shapes_only=True)``) has no numbers: it counts the bytes of the tensors that are alive, for models of any size.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

from algorist.models import precision

NAME = "pretend"
VIEWS = set(
    "view _unsafe_view transpose t permute expand slice select squeeze unsqueeze detach alias as_strided split "
    "split_with_sizes unbind chunk narrow view_as_complex view_as_real diagonal unfold _reshape_alias lift_fresh "
    "unflatten real imag".split()
)
MAY_MIX = {"_to_copy", "copy_", "index", "index_put_", "index_put", "_index_put_impl_", "_copy_from"}
NO_LAUNCH = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "is_same_size",
    "_local_scalar_dense",
}
SYNCS = {"nonzero", "masked_select", "_unique2", "equal", "_local_scalar_dense"}
# What CUDA's autocast does (ATen/autocast_mode.h), as far as our passes meet it.
LOWER = "linear mm addmm bmm baddbmm matmul mv scaled_dot_product_attention".split()
FLOAT32 = (
    "exp log log1p pow.Tensor_Scalar softplus layer_norm rsqrt cumsum softmax.int log_softmax.int sum.dim_IntList sum "
    "logsumexp rms_norm nll_loss".split()
)
PROMOTE = "addcmul addcdiv index_put scatter_add".split()


class Log:
    """What the device was asked for: launches and syncs by operation, syncs by place."""

    def __init__(self) -> None:
        self.reset()

    shapes_only = False
    held = peak = 0
    """On a device of shapes only: bytes of the tensors that are alive, and the most at one time."""

    def reset(self) -> None:
        """Forget everything so far; what is alive stays."""
        self.peak = self.held
        self.launches: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.bytes = 0  # that operations wrote to new tensors

    def sync(self, kind: str) -> None:
        """Count a point where the host waits for the device."""
        self.syncs[kind] += 1
        frame = sys._getframe()
        while frame.f_back is not None and "/algorist/" not in frame.f_code.co_filename:
            frame = frame.f_back
        self.places[f"{kind} {frame.f_code.co_filename.rpartition('/algorist/')[2]}:{frame.f_lineno}"] += 1

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Count a storage for as long as it lives."""
        if storage._cdata not in _ALIVE:
            _ALIVE.add(storage._cdata)
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())

    def _release(self, place: int, size: int) -> None:
        _ALIVE.discard(place)
        self.held -= size


_ALIVE: set[int] = set()
LOG = Log()


class OnDevice(torch.Tensor):
    """A tensor of the pretend device; ``inner`` holds the numbers."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        if LOG.shapes_only:
            inner = inner.to("meta")
            LOG.hold(inner.untyped_storage())
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device(NAME, 0),
            requires_grad=inner.requires_grad,
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute one operation on the inner tensors; its result is on the device when an input was or ``device`` says so."""
    name = func.overloadpacket.__name__
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    ours = any(isinstance(t, OnDevice) for t in tensors)
    foreign = [t for t in tensors if not isinstance(t, OnDevice)]
    if ours and name not in MAY_MIX and any(t.dim() for t in foreign):
        raise RuntimeError(
            f"Expected all tensors to be on the same device: {func} got cpu {[tuple(t.shape) for t in foreign]}"
        )
    asked, stays = kwargs.get("device"), ours
    if asked is not None:
        stays = torch.device(asked).type == NAME
        if (
            stays or ours or not LOG.shapes_only
        ):  # on the host, shapes have no numbers either, and are not counted
            kwargs = {**kwargs, "device": torch.device("meta" if LOG.shapes_only else "cpu")}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    if name in ("copy_", "index_put_", "_index_put_impl_"):
        stays = isinstance(args[0], OnDevice)

    def open_(value: Any) -> Any:
        if isinstance(value, OnDevice):
            return value.inner
        return value.to("meta") if LOG.shapes_only and ours and isinstance(value, Tensor) else value

    kernel = func if LOG.shapes_only else CUDA_ONLY.get(name, func)
    result = kernel(*tree_map(open_, args), **tree_map(open_, kwargs))
    if ours or stays:
        _count(name, args, result, ours, stays, asked is not None, bool(foreign))
    if name == "_local_scalar_dense" or not stays:
        return result
    written = [
        a
        for a, s in zip(args, func._schema.arguments, strict=False)
        if s.alias_info is not None and s.alias_info.is_write
    ]
    if written and isinstance(result, Tensor):
        return written[0]
    if kwargs.get("out") is not None:
        return kwargs["out"]
    wrapped = tree_map(
        lambda t: OnDevice(t) if isinstance(t, Tensor) and not isinstance(t, OnDevice) else t, result
    )
    if ours and name in VIEWS:
        return return_and_correct_aliasing(func, args, kwargs, wrapped)
    return wrapped


def _count(name: str, args: Any, result: Any, ours: bool, stays: bool, moved: bool, mixed: bool) -> None:
    by_mask = name == "index" and any(
        isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] or []
    )
    if name in SYNCS or by_mask:
        LOG.sync(name)
    if name == "_to_copy" and moved and ours != stays:
        LOG.sync("device to host" if ours else "host to device")
    elif name == "copy_" and mixed:
        LOG.sync("copy")
    if name not in VIEWS and name not in NO_LAUNCH:
        LOG.launches[name] += 1
        LOG.bytes += sum(t.nbytes for t in tree_flatten(result)[0] if isinstance(t, Tensor))


# ---- kernels that exist on CUDA only ---------------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """(H, Lq, Lk) in float32; the causal mask begins at the top left, as in torch's kernels for equal lengths."""
    k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    scores = q.float() @ k.float().transpose(1, 2) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")) if causal else scores


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal, scale)
    values = v.float().repeat_interleave(q.shape[0] // v.shape[0], 0)
    return (scores.softmax(-1) @ values).to(q.dtype), scores.logsumexp(-1)


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    repeat = q.shape[0] // k.shape[0]
    weight = (_scores(q, k, causal, scale) - lse[..., None]).exp()
    grad, values = grad.float(), v.float().repeat_interleave(repeat, 0)
    slope = weight * (grad @ values.transpose(1, 2) - (grad * out.float()).sum(-1, keepdim=True)) * scale
    dq = slope @ k.float().repeat_interleave(repeat, 0)
    dk, dv = slope.transpose(1, 2) @ q.float(), weight.transpose(1, 2) @ grad
    dk, dv = (t.unflatten(0, (-1, repeat)).sum(1) for t in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _pieces(edges_q: Tensor, edges_k: Tensor) -> list[tuple[slice, slice]]:
    assert edges_q.dtype == edges_k.dtype == torch.int32, "the kernel takes int32"
    spans = [[slice(a, b) for a, b in pairwise(e)] for e in (edges_q.tolist(), edges_k.tolist())]
    return list(zip(*spans, strict=True))


def _check_types(*given: Tensor) -> None:
    assert len({t.dtype for t in given}) == 1, f"the kernel takes one type, not {[t.dtype for t in given]}"


def _flash_forward(q, k, v, edges_q, edges_k, max_q, max_k, dropout, causal, debug, *, scale=None, **_):
    assert q.dtype in (torch.bfloat16, torch.float16), f"flash attention takes 16-bit types, not {q.dtype}"
    assert torch.cuda.get_device_capability() >= (8, 0), "FlashAttention only supports Ampere GPUs or newer"
    _check_types(q, k, v)
    assert q.shape[-1] % 8 == 0 and q.dim() == 3 and q.stride(-1) == 1
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
    for a, b in _pieces(edges_q, edges_k):
        assert a.stop - a.start <= max_q and b.stop - b.start <= max_k
        part, part_lse = _attend(*(t.transpose(0, 1) for t in (q[a], k[b], v[b])), causal, scale)
        out[a], lse[:, a] = part.transpose(0, 1), part_lse
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros(()), torch.zeros(0)


def _flash_backward(
    grad,
    q,
    k,
    v,
    out,
    lse,
    edges_q,
    edges_k,
    max_q,
    max_k,
    dropout,
    causal,
    state,
    unused,
    *,
    scale=None,
    **_,
):
    _check_types(grad, q, k, v, out)
    assert lse.dtype == torch.float32
    found = [torch.zeros_like(t) for t in (q, k, v)]
    for a, b in _pieces(edges_q, edges_k):
        given = (t.transpose(0, 1) for t in (grad[a], q[a], k[b], v[b], out[a]))
        parts = _attend_backward(*given, lse[:, a], causal, scale)
        for whole, place, part in zip(found, (a, b, b), parts, strict=True):
            whole[place] = part.transpose(0, 1)
    return tuple(found)


def _efficient_forward(q, k, v, bias, compute_lse, dropout=0.0, causal=False, *, scale=None):
    assert bias is None and q.shape[1] == k.shape[1], "dense masks, or fewer key heads than the kernel takes"
    old = torch.cuda.get_device_capability() < (8, 0)
    assert not (old and q.dtype == torch.bfloat16), "cutlassF: no kernel found to launch!"
    _check_types(q, k, v)
    parts = [_attend(*given, causal, scale) for given in zip(q, k, v, strict=True)]
    lse = torch.full((*q.shape[:2], -(-q.shape[2] // 32) * 32), float("inf"))
    lse[:, :, : q.shape[2]] = torch.stack([p[1] for p in parts])
    return torch.stack([p[0] for p in parts]), lse, torch.zeros(()), torch.zeros(())


def _efficient_backward(
    grad, q, k, v, bias, out, lse, seed, offset, dropout, mask, causal=False, *, scale=None
):
    assert lse.shape[2] % 32 == 0, "log-sum-exps are padded to 32"
    _check_types(grad, q, k, v, out)
    lse = lse[:, :, : q.shape[2]]
    parts = [_attend_backward(*given, causal, scale) for given in zip(grad, q, k, v, out, lse, strict=True)]
    return *(torch.stack(p) for p in zip(*parts, strict=True)), None


def _bmm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    return torch.bmm(a, b) if out_dtype is None else torch.bmm(a.to(out_dtype), b.to(out_dtype))


CUDA_ONLY: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "bmm": _bmm,
}


# ---- the device ------------------------------------------------------------------------------------------------------


class _Module:
    """torch.pretend; the device is there only inside ``pretend_gpu``."""

    present = False

    def is_available(self) -> bool:
        return self.present

    def is_initialized(self) -> bool:
        return self.present

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def __getattr__(self, name: str) -> Any:
        if name in ("set_device", "_lazy_init", "_is_in_bad_fork", "manual_seed_all", "synchronize"):
            return lambda *_: None
        raise AttributeError(name)


@cache
def register() -> tuple[_Module, list[Any]]:
    """Register the device with torch and CUDA's autocast rules for it, once per process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    module = _Module()
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    ours, rest = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    for names, kind in ((LOWER, "lower"), (FLOAT32, "float32"), (PROMOTE, "promote")):
        for name in names:
            ours.impl(name, _autocast(name, kind), "AutocastPrivateUse1")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    # One kernel, as on CUDA; a device without its own gets it in pieces.
    ours.impl("silu_backward", lambda *_: None, "PrivateUse1")
    return module, [ours, rest]


def _autocast(name: str, kind: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")
    excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(value: Any, dtype: torch.dtype) -> Any:
        is_ours = isinstance(value, Tensor) and value.device.type == NAME and value.is_floating_point()
        return value.to(dtype) if is_ours and value.dtype != torch.float64 else value

    def implementation(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            types = [a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()]
            dtype = torch.float32
            if kind == "lower":
                dtype = torch.get_autocast_dtype(NAME)
            elif kind == "promote" and types and torch.float32 not in types:
                dtype = types[0]
            return func(*tree_map(lambda a: cast(a, dtype), args), **kwargs)

    return implementation


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class _Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.tolist, torch.Tensor.numpy) and isinstance(args[0], OnDevice):
            if func is torch.Tensor.numpy:
                raise TypeError("can't convert pretend:0 device type tensor to numpy")
            LOG.sync("tolist")
            return args[0].inner.tolist()
        asked = kwargs.get("device")
        if (
            func in (torch.tensor, torch.as_tensor, torch.asarray)
            and asked is not None
            and torch.device(asked).type == NAME
        ):
            if isinstance(args[0], OnDevice):
                return args[0]
            return func(*args, **{k: v for k, v in kwargs.items() if k != "device"}).to(NAME)
        return func(*args, **kwargs)


@contextmanager
def pretend_gpu(
    *,
    capability: tuple[int, int] = (9, 0),
    free: int = 8 << 30,
    reserved: int = 0,
    allocated: int = 0,
    shapes_only: bool = False,
) -> Iterator[Log]:
    """Make the device usable; ``torch.cuda`` answers for it.

    Args:
        capability: Compute capability; below (8, 0) bfloat16 is emulated only.
        free: Bytes that the driver calls free.
        reserved: Bytes that torch's allocator holds.
        allocated: Bytes of them in use.
        shapes_only: Tensors have no numbers; the log counts their bytes (``held``, ``peak``).
    """
    module, _ = register()
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "mem_get_info": lambda device=None: (free, 24 << 30),
        "memory_reserved": lambda device=None: reserved,
        "memory_allocated": lambda device=None: allocated,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
        "get_device_capability": lambda device=None: capability,
        "empty_cache": lambda: None,
    }
    lifted = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    LOG.reset()
    LOG.shapes_only = shapes_only
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        # The wrappers cannot be inference tensors.
        stack.enter_context(patch.object(torch, "inference_mode", lambda mode=True: torch.no_grad()))
        stack.enter_context(patch.object(module, "present", True))
        stack.enter_context(patch.object(precision, "GPUS", {"cuda", NAME}))
        for mode in (_Function(), _Dispatch()):
            stack.enter_context(mode)
        try:
            yield LOG
        finally:
            torch._C._set_only_lift_cpu_tensors(lifted)
            LOG.shapes_only = False


def to_device(module: Any) -> Any:
    """Move a module's parameters and buffers to the device, in place; tied weights stay tied."""
    moved: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                made = moved.get(id(parameter))
                if made is None:
                    made = nn.Parameter(OnDevice(parameter.detach()), parameter.requires_grad)
                part._parameters[name] = moved[id(parameter)] = made
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = OnDevice(buffer)
    return module


@contextmanager
def autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast of the pretend device to ``dtype``; None leaves it off."""
    if dtype is None:
        yield
        return
    torch.set_autocast_enabled(NAME, True)
    torch.set_autocast_dtype(NAME, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(NAME, False)
        torch.clear_autocast_cache()


def numbers(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers as a CPU tensor."""
    return tensor.inner if isinstance(tensor, OnDevice) else tensor
