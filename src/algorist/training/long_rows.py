"""The last resort for a completion that does not fit by itself: its MLPs in tiles, its layers' inputs in the host's memory.

With activation checkpointing an update holds every layer's input, and everything inside one layer. Most of the latter are the four
wide tensors of the gated MLP, which takes each token by itself: in tiles, each computed once more when its turn comes in the
backward pass, it holds those of one tile. That costs a third forward of the MLP. The inputs wait in the host's memory until the backward
pass asks for them: two copies over the bus per layer. Source: TiledMLP and checkpoint offloading of Arctic Long Sequence Training
(2506.13996).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from algorist.models.precision import on_gpu

TILE_TOKENS = 4096
"""Tokens of a tile: enough for the products, a quarter of a row of 16,384."""


def tiles(mlp: Any, tokens: int) -> int:
    """Return in how many tiles an MLP is computed: 1 below two tiles' tokens, and for anything but a dense gated MLP."""
    dense = all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
    return -(-tokens // TILE_TOKENS) if dense and tokens >= 2 * TILE_TOKENS else 1


@contextmanager
def mlp_in_tiles(layer: Any, tokens: int) -> Iterator[None]:
    """Let ``layer`` compute its MLP of ``tokens`` tokens in tiles, where it has one that can be; None: nothing changes."""
    mlp: Any = getattr(layer, "mlp", None)
    if tiles(mlp, tokens) == 1:
        yield
        return
    own, plain = vars(mlp).get("forward"), mlp.forward

    def forward(hidden_BTH: Tensor) -> Tensor:
        parts = hidden_BTH.split(TILE_TOKENS, dim=1)
        return torch.cat([checkpoint(plain, part, use_reentrant=False) for part in parts], dim=1)

    mlp.forward = forward
    try:
        yield
    finally:
        if own is None:
            del mlp.forward
        else:
            mlp.forward = own


@contextmanager
def input_on_host(hidden: Any) -> Iterator[None]:
    """Let what a checkpointed layer keeps of its input ``hidden`` (1, N, H) wait in the host's memory; nothing changes without a GPU."""
    if not isinstance(hidden, Tensor) or not on_gpu(hidden.device):
        yield
        return

    shape, device = hidden.shape, hidden.device

    def pack(tensor: Tensor) -> Tensor | tuple[Tensor]:
        # Detached: the graph would hold itself, and stay after a pass that fails.
        return (tensor.detach().to("cpu"),) if tensor.shape == shape else tensor.detach()

    def unpack(kept: Tensor | tuple[Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept[0].to(device)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
