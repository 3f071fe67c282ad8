"""How many tokens one forward and backward of an update may have, from the memory that a GPU has left."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from algorist.config.schema import GRPOSection
from algorist.models.precision import compute_dtype, on_gpu, unused_gpu_bytes, weight_dtype
from algorist.models.sharding import is_sharded, own_part, unwrap
from algorist.training.batch import Batch
from algorist.training.log_probs import LogProbs, packed_log_probs

log = logging.getLogger("algorist.training.part_size")

SHARE = 0.7
"""Of the memory that is left: the rest is for the head's tiles, gradients inside a layer and fragments."""
_SHORT, _LONG = 32, 96


def saved_bytes(forward: Callable[[], Tensor], model: nn.Module) -> int:
    """Return the bytes that autograd keeps for the backward pass of ``forward``, each storage once, without weights."""

    def place(tensor: Tensor) -> int:
        storage = own_part(tensor).untyped_storage()
        # a model of shapes only (meta device) has no addresses
        return storage.data_ptr() or int(storage._cdata)

    weights = {place(p) for p in model.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}  # alive, so that no address is used twice

    def pack(tensor: Tensor) -> None:
        # A tensor that is kept, or given back to the graph, would hold the graph that holds it: a circle through C++, which
        # no collector of Python finds, around the whole model.
        if (where := place(tensor)) not in weights:
            seen[where] = tensor.untyped_storage()

    def unpack(_: None) -> Tensor:
        raise AssertionError("what is only counted has no backward pass")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        forward()
    return sum(storage.nbytes() for storage in seen.values())


def state_bytes(optim: str) -> int:
    """Return the bytes of optimizer states per trained weight: two moments, in float32 or in 8 bit."""
    return 2 if "8bit" in optim else 8


@torch.enable_grad()
def tokens_that_fit(model: Any, section: GRPOSection, optimizer: Any = None) -> int | None:
    """Return ``grpo.micro_batch_tokens``, or on a GPU what the memory allows; None where that is not known.

    Gradients, optimizer states and the products' copies of the weights are counted in before they are there, this process's part
    of them where weights are sharded. What a token takes is counted on two short forwards; every process must call this.
    """
    base = unwrap(model)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    device = next(base.parameters()).device
    if section.micro_batch_tokens is not None or not on_gpu(device):
        return section.micro_batch_tokens

    # Before the forwards, which leave parts of a sharded model whole.
    trained = [p for p in model.parameters() if p.requires_grad]
    states = 0 if optimizer is not None and optimizer.state else state_bytes(section.optim)
    coming = sum(own_part(p).numel() * (p.element_size() + states) for p in trained)

    def kept(tokens: int) -> int:
        half = tokens // 2
        row, mask = [1] * half, torch.ones(1, half, dtype=torch.bool, device=device)
        batch = Batch([row], [row], [0], torch.zeros(1, device=device), mask)
        if LogProbs(verify=False).why_plain(model, batch) is not None:
            return 0
        mixed = weight_dtype(base) != compute_dtype(base)
        with torch.autocast(device.type, dtype=compute_dtype(base), enabled=mixed, cache_enabled=False):
            return saved_bytes(lambda: packed_log_probs(model, batch)[0].sum(), base)

    per_token = (kept(_LONG) - kept(_SHORT)) / (_LONG - _SHORT)
    if per_token <= 0:
        return None
    config = base.config.get_text_config()
    if section.gradient_checkpointing:
        inputs = config.hidden_size * config.num_hidden_layers * weight_dtype(base).itemsize
        per_token = inputs + per_token / config.num_hidden_layers
    if weight_dtype(base) != compute_dtype(base):
        copies = sum(getattr(p, "ds_numel", p.numel()) for p in base.parameters())
        one_layer = section.gradient_checkpointing or is_sharded(base)
        coming += copies * compute_dtype(base).itemsize // (config.num_hidden_layers if one_layer else 1)
    left = unused_gpu_bytes(device) - coming
    tokens = max(1, int(SHARE * left / per_token))
    log.info(
        "one forward and backward takes up to %d tokens (%.1f MB each, %.1f GB left)",
        tokens,
        per_token / 1e6,
        left / 1e9,
    )
    return tokens
