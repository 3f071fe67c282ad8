"""The gated activation of an MLP in one Triton kernel; its plain twin is ``silu(gate) * up``.

A file of its own because ``weights.py`` reads it, which everything else in Triton lies above.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[misc]
def _gated_kernel(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    gate = tl.load(gate_ptr + i, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + i, mask=inside).to(tl.float32)
    tl.store(out_ptr + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up."""
    if not (gate.is_contiguous() and up.is_contiguous()):
        return torch.nn.functional.silu(gate) * up
    out = torch.empty_like(gate)
    _gated_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](gate, up, out, gate.numel(), BLOCK=_BLOCK)
    return out
