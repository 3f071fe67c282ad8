"""How many tokens one forward and backward of an update may have, from the memory that a GPU has left."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from algorist.config.schema import GRPOSection
from algorist.models.precision import compute_dtype, on_gpu, unused_gpu_bytes, weight_dtype
from algorist.models.sharding import unwrap
from algorist.training.batch import Batch
from algorist.training.log_probs import LogProbs, packed_log_probs

log = logging.getLogger("algorist.training.part_size")

SHARE = 0.7
"""Of the memory that is left: the rest is for the head's tiles, gradients inside a layer and fragments."""
_SHORT, _LONG = 32, 96


def saved_bytes(forward: Callable[[], Tensor], model: nn.Module) -> int:
    """Return the bytes that autograd keeps for the backward pass of ``forward``, each storage once, without weights."""

    def place(tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        # a model of shapes only (meta device) has no addresses
        return storage.data_ptr() or int(storage._cdata)

    weights = {place(p) for p in model.parameters()}
    seen: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        where = place(tensor)
        if where not in weights:
            seen[where] = tensor.untyped_storage().nbytes()
            alive.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(seen.values())


def state_bytes(optim: str) -> int:
    """Return the bytes of optimizer states per trained weight: two moments, in float32 or in 8 bit."""
    return 2 if "8bit" in optim else 8


def tokens_that_fit(model: Any, section: GRPOSection) -> int | None:
    """Return ``grpo.micro_batch_tokens``, or on a GPU what the memory allows; None where that is not known.

    Gradients, optimizer states and the products' copies of the weights are counted in before they are there. What a token takes is
    counted on two short forwards.
    """
    base = unwrap(model)
    device = next(base.parameters()).device
    if section.micro_batch_tokens is not None or not on_gpu(device):
        return section.micro_batch_tokens

    def kept(tokens: int) -> int:
        half = tokens // 2
        row, mask = [1] * half, torch.ones(1, half, dtype=torch.bool, device=device)
        batch = Batch([row], [row], [0], torch.zeros(1, device=device), mask)
        if LogProbs(verify=False).why_plain(base, batch) is not None:
            return 0
        mixed = weight_dtype(base) != compute_dtype(base)
        with torch.autocast(device.type, dtype=compute_dtype(base), enabled=mixed, cache_enabled=False):
            return saved_bytes(lambda: packed_log_probs(base, batch)[0].sum(), base)

    per_token = (kept(_LONG) - kept(_SHORT)) / (_LONG - _SHORT)
    if per_token <= 0:
        return None
    config = base.config.get_text_config()
    if section.gradient_checkpointing:
        inputs = config.hidden_size * config.num_hidden_layers * weight_dtype(base).itemsize
        per_token = inputs + per_token / config.num_hidden_layers
    trained = [p for p in model.parameters() if p.requires_grad]
    coming = sum(p.numel() * (p.element_size() + state_bytes(section.optim)) for p in trained)
    if weight_dtype(base) != compute_dtype(base):
        copies = sum(p.numel() for p in base.parameters()) * compute_dtype(base).itemsize
        coming += copies // config.num_hidden_layers if section.gradient_checkpointing else copies
    left = unused_gpu_bytes(device) - coming
    tokens = max(1, int(SHARE * left / per_token))
    log.info(
        "one forward and backward takes up to %d tokens (%.1f MB each, %.1f GB left)",
        tokens,
        per_token / 1e6,
        left / 1e9,
    )
    return tokens
