"""Attention of 16-bit models on a CPU, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from algorist.models.precision import HALF, compute_dtype


class _Float32Attention(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention or len(args) != 3 or args[2].dtype not in HALF:
            return func(*args, **named)
        mask = named.get("attn_mask")
        if mask is not None and mask.is_floating_point():
            named["attn_mask"] = mask.float()
        with torch.autocast("cpu", enabled=False):
            return func(*(t.float() for t in args), **named).to(args[2].dtype)


@contextmanager
def float32_attention(model: Any) -> Iterator[None]:
    """Run sdpa of a model with 16-bit products in float32 on the CPU, whose 16-bit kernel goes backward two to eight times as long."""
    weight = model.get_input_embeddings().weight
    half_on_cpu = weight.device.type == "cpu" and compute_dtype(model) in HALF
    with _Float32Attention() if half_on_cpu else nullcontext():
        yield
