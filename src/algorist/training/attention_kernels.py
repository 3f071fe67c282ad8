"""Attention kernels of the packed row, with gradients: torch's own, which take and give log-sum-exps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from algorist.models.precision import HALF, has_tensor_cores_for, on_gpu

ForwardKernel = Callable[..., tuple[Tensor, Tensor]]
"""(Query, key, value), causal, scale, mask → attention and its log-sum-exp."""
BackwardKernel = Callable[..., tuple[Tensor, ...]]
"""(The output's gradient, query, key, value, output, log-sum-exp), causal, scale, mask → gradients of query, key and value."""


class Edges(NamedTuple):
    """Offsets of sequences of unequal length, one after the other (int32), and the longest length."""

    offsets: Tensor
    longest: int


def kernel_for(query: Tensor, value: Tensor) -> Any:
    """Return ``varlen``, the forward and backward of a kernel for blocks, or None for plain operations."""
    device, size = query.device, query.shape[-1]
    if size != value.shape[-1]:
        return None
    if device.type == "cpu":
        return cpu_forward, cpu_backward
    if not on_gpu(device) and device.type != "meta":
        return None
    half = query.dtype in HALF
    if half and size % 8 == 0 and size <= 256 and has_tensor_cores_for(torch.bfloat16, device):
        return "varlen"
    return (efficient_forward, efficient_backward) if size % 8 == 0 else None


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, own: Edges, other: Edges, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention (N, H, d) and its log-sum-exp (H, N)."""
    parts = torch.ops.aten._flash_attention_forward(
        q, k, v, own.offsets, other.offsets, own.longest, other.longest, 0.0, causal, False, scale=scale
    )
    return parts[0], parts[1]


def varlen_backward(
    tensors: Sequence[Tensor], own: Edges, other: Edges, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value; ``tensors`` are those of ``BackwardKernel``."""
    grad, *others = tensors
    device = grad.device
    state = torch.zeros(2, dtype=torch.uint64, device=device)  # of the dropout that there is not
    edges = own.offsets, other.offsets, own.longest, other.longest
    slopes: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(
        grad.contiguous(), *others, *edges, 0.0, causal, state, torch.empty(0, device=device), scale=scale
    )
    return slopes


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention
_efficient_backward_op = torch.ops.aten._scaled_dot_product_efficient_attention_backward
_LSE_ALIGNMENT = 32  # the memory-efficient kernel fills log-sum-exps up to it, with infinity


def cpu_forward(
    tensors: Sequence[Tensor], causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    mask = None if mask is None else mask.to(tensors[0].dtype)
    out, lse = _flash(*tensors, 0.0, causal and mask is None, attn_mask=mask, scale=scale)
    return out, lse


def cpu_backward(
    tensors: Sequence[Tensor], causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, ...]:
    mask = None if mask is None else mask.to(tensors[0].dtype)
    causal = causal and mask is None
    slopes: tuple[Tensor, ...] = _flash_backward(*tensors, 0.0, causal, attn_mask=mask, scale=scale)
    return slopes


def efficient_forward(
    tensors: Sequence[Tensor], causal: bool, scale: float, mask: None = None
) -> tuple[Tensor, Tensor]:
    q, k, v = tensors
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    out, lse, *_ = _efficient(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[:, :, : q.shape[2]]


def efficient_backward(
    tensors: Sequence[Tensor], causal: bool, scale: float, mask: None = None
) -> tuple[Tensor, ...]:
    grad, q, k, v, out, lse = tensors
    heads = k.shape[1]
    k, v = (t.repeat_interleave(q.shape[1] // heads, 1) for t in (k, v))
    lse = F.pad(lse, (0, -lse.shape[2] % _LSE_ALIGNMENT), value=float("inf")).contiguous()
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    needs = [True, True, True, False]
    dq, dk, dv, _ = _efficient_backward_op(
        grad, q, k, v, None, out, lse, seed, seed, 0.0, needs, causal, scale=scale
    )
    dk, dv = (t.unflatten(1, (heads, -1)).sum(2) for t in (dk, dv))
    return dq, dk, dv
