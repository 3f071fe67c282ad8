"""Numbers for torch's CUDA build on the stub, whose kernels do nothing.

Device memory is host memory: after each CUDA operation, whose checks, dispatch, allocations and launches are real, the same
operation runs on CPU tensors over the same memory. Operations whose result has a shape that follows from numbers run on the CPU
alone. Kernels that exist on CUDA only are those of the pretend device (``tests/cuda/pretend.py``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from algorist.rollouts.native.graph_tier import Step
from tests.cuda.pretend import CUDA_ONLY

BY_NUMBERS = set(
    "masked_scatter_backward nonzero masked_select _unique2 unique_dim unique_consecutive equal _local_scalar_dense "
    "repeat_interleave nonzero_static bincount histc".split()
)
NO_NUMBERS = set(
    "empty empty_like new_empty empty_strided new_empty_strided resize_ set_ record_stream _pin_memory is_pinned "
    "_resize_output_ _has_compatible_shallow_copy_type storage_offset is_same_size sym_size sym_stride sym_numel "
    "sym_storage_offset".split()
)


def on_host(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over the memory of a CUDA tensor."""
    if tensor.device.type != "cuda":
        return tensor
    storage = tensor.untyped_storage()
    if not storage.nbytes() or not tensor.numel():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    base = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(base, tensor.storage_offset(), tensor.size(), tensor.stride())


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Return the scores (B, H, Lq, Lk) in float32."""
    scores = q.float() @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).float().transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return scores if bias is None else scores + bias.float()


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None):
    scores = _weights(q, k, bias, causal, scale or q.shape[-1] ** -0.5)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1).float()
    return (scores.softmax(-1) @ values).to(q.dtype), scores.logsumexp(-1)


def _flash(q, k, v, dropout=0.0, causal=False, debug=False, *, scale=None):
    return _attention(q, k, v, None, causal, scale)


def _efficient(q, k, v, bias, compute_lse, dropout=0.0, causal=False, *, scale=None):
    out, lse = _attention(q, k, v, bias, causal, scale)
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))
    return out, padded if compute_lse else lse[..., :0]


def _slopes(grad, q, k, v, bias, causal, scale):
    repeat, scale = q.shape[1] // k.shape[1], scale or q.shape[-1] ** -0.5
    weight, grad = _weights(q, k, bias, causal, scale).softmax(-1), grad.float()
    slope = grad @ v.repeat_interleave(repeat, 1).float().transpose(-1, -2)
    slope = weight * (slope - (slope * weight).sum(-1, keepdim=True)) * scale
    dq = slope @ k.repeat_interleave(repeat, 1).float()
    dk, dv = slope.transpose(-1, -2) @ q.float(), weight.transpose(-1, -2) @ grad
    dk, dv = (t.unflatten(1, (-1, repeat)).sum(2) for t in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _flash_backward(grad, q, k, v, out, lse, e1, e2, m1, m2, dropout, causal, s1, s2, *, scale=None):
    return _slopes(grad, q, k, v, None, causal, scale)


def _efficient_backward(grad, q, k, v, bias, out, lse, s1, s2, dropout, mask, causal=False, *, scale=None):
    if bias is None and scale is not None:  # the log-sum-exp may be of more keys than these
        return CUDA_ONLY[_BACKWARD](grad, q, k, v, None, out, lse, s1, s2, dropout, mask, causal, scale=scale)
    return *_slopes(grad, q, k, v, bias, causal, scale), None


def _addmm(added, a, b, out_dtype=None, *, beta=1, alpha=1, out=None):
    kind = out_dtype or a.dtype
    found = torch.addmm(added.to(kind), a.to(kind), b.to(kind), beta=beta, alpha=alpha)
    return found if out is None else out.copy_(found)


def _mm(a, b, out_dtype=None, *, out=None):
    found = torch.mm(a.to(out_dtype or a.dtype), b.to(out_dtype or a.dtype))
    return found if out is None else out.copy_(found)


_BACKWARD = "_scaled_dot_product_efficient_attention_backward"
KERNELS = {
    **CUDA_ONLY,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    _BACKWARD: _efficient_backward,
}
WITH_TYPE = {"addmm": _addmm, "mm": _mm}
"""Products with a type of their own for the result, which the CPU has not."""


BY_MASK = ("index", "index_put", "index_put_", "_index_put_impl_")


class Emulate(TorchDispatchMode):
    """Computes every operation on CUDA tensors on the host as well; ``missing`` are those it could not, and why.

    What is captured is computed when it is replayed (``numbers_of_a_replay``).
    """

    def __init__(self, missing: dict[str, str] | None = None) -> None:
        super().__init__()
        self.missing = {} if missing is None else missing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        wanted = kwargs.get("device")
        made_there = wanted is not None and torch.device(wanted).type == "cuda"
        if not made_there and not any(t.device.type == "cuda" for t in tensors):
            return func(*args, **kwargs)
        if torch.cuda.is_current_stream_capturing():
            return func(*args, **kwargs)
        by_mask = name in BY_MASK and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if name in BY_NUMBERS or by_mask:
            return self._by_numbers(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if name in NO_NUMBERS or self._is_view(func, tensors, result):
            return result
        written = any(s.alias_info is not None and s.alias_info.is_write for s in func._schema.arguments)
        mine = self._on_host(func, name, args, kwargs)
        if mine is not None and not written:
            self._fill(name, result, mine)
        return result

    @staticmethod
    def _by_numbers(func: Any, name: str, args: Any, kwargs: Any) -> Any:
        a, k = tree_map(lambda v: on_host(v) if isinstance(v, Tensor) else v, (args, kwargs))
        with torch.no_grad():
            result = func(*a, **{key: value for key, value in k.items() if key != "device"})
        if name in ("index_put_", "_index_put_impl_"):
            return args[0]
        torch.cuda.current_stream().synchronize()  # the host needs the numbers: not inside a capture
        if name in ("_local_scalar_dense", "equal"):
            return result
        return tree_map(lambda t: t.to("cuda") if isinstance(t, Tensor) else t, result)

    @staticmethod
    def _is_view(func: Any, tensors: list[Tensor], result: Any) -> bool:
        schema = func._schema
        if any(s.alias_info is not None and s.alias_info.is_write for s in schema.arguments):
            return False
        if not any(r.alias_info is not None for r in schema.returns):
            return False
        # In inference mode reshape, contiguous and to come here whole, and may have copied.
        own = {t.untyped_storage().data_ptr() for t in tensors}
        made = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor) and t.device.type == "cuda"]
        return all(t.untyped_storage().data_ptr() in own for t in made)

    def _on_host(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        a, k = tree_map(lambda v: on_host(v) if isinstance(v, Tensor) else v, (args, kwargs))
        k = {key: value for key, value in k.items() if key not in ("generator", "pin_memory")}
        if k.get("device") is not None:
            k["device"] = "cpu"
        if name == "_to_copy":
            k.pop("non_blocking", None)
        kernel = KERNELS.get(name, func)
        if func._overloadname.startswith("dtype"):
            kernel = WITH_TYPE.get(name, kernel)
        try:
            with torch.no_grad():
                return kernel(*a, **k)
        except (NotImplementedError, RuntimeError, TypeError, AssertionError) as error:
            self.missing[name] = f"{type(error).__name__}: {str(error)[:200]}"
            return None

    def _fill(self, name: str, theirs: Any, mine: Any) -> None:
        for left, right in zip(tree_flatten(theirs)[0], tree_flatten(mine)[0], strict=False):
            if not isinstance(left, Tensor) or not isinstance(right, Tensor) or not left.numel():
                continue
            if left.numel() != right.numel():
                self.missing[f"{name}, shape"] = f"{tuple(left.shape)} {tuple(right.shape)}"
            else:
                on_host(left).copy_(right.reshape(left.shape))


class Integers(Emulate):
    """Computes integers and truth values alone, labels and masks: of models of any size the shapes that follow from them are right."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "masked_scatter_backward":
            return args[0].new_empty(args[2])
        if name in BY_MASK:
            places: list[Any] = []
            for index in args[1]:
                by_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
                places += (
                    [i.to(index.device) for i in on_host(index).nonzero(as_tuple=True)]
                    if by_mask
                    else [index]
                )
            return func(args[0], places, *args[2:], **(kwargs or {}))
        if any(isinstance(t, Tensor) and t.is_floating_point() for t in tree_flatten((args, kwargs))[0]):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def numbers_of_a_replay(run: Callable[[Step], None]) -> Callable[[Step], None]:
    """Return ``Step.run`` that computes directly what a replayed graph would have written."""

    def both(step: Step) -> None:
        run(step)
        if step._graph is not None:
            step.body()

    return both
