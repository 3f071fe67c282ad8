"""How many tokens one forward and backward of an update may have, from the memory that its device has left.

What the backward pass keeps of a token is counted on two short forwards; weights' gradients, moments, the products' copies and the
head's tiles are counted in before they are there. On a CPU a part takes no more than ``PART_BYTES`` however much is left: larger ones
are not faster, and other programs need memory too.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from algorist.config.schema import GRPOSection, Recipe, SFTSection
from algorist.config.section import MOST
from algorist.errors import ConfigError, is_out_of_memory
from algorist.models.memory import memory_left
from algorist.models.precision import HALF, Precision, autocast_of, compute_dtype, on_gpu, weight_dtype
from algorist.models.sharding import is_sharded, own_part, unwrap
from algorist.training.batch import Batch
from algorist.training.head_tiles import TILE_COLUMNS, TILE_ROWS
from algorist.training.lm_head import CACHE_BYTES, CHUNK_ELEMENTS
from algorist.training.log_probs import LogProbs, packed_log_probs, plain_log_probs, recomputes
from algorist.training.packed import NotPackable

log = logging.getLogger("algorist.training.part_size")

SHARE = 0.7
"""Of the memory that is left: the rest is for the head's tiles, gradients inside a layer and fragments."""
COMPLETION_TOKENS = 1024
"""Tokens at the head of one part on a CPU, for what it sets aside there."""
PART_BYTES = 2 * 10**9
"""Most that the forward pass of one part keeps for its backward pass on a CPU."""
MIXED_BYTES = 10
"""What a layer keeps more under autocast than in 16 bit, per token and width: its stream and norms are float32 (counted)."""
ADAPTER_RANK = 16
"""Of the adapter that is advised where all weights do not fit."""
_SHORT, _LONG = 32, 96
_slopes: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()
"""Bytes per token of models that are shapes only and never change."""


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


def _forward(base: Any, ids: Tensor, autocast: contextlib.AbstractContextManager[Any]) -> Tensor:
    """Return something to differentiate from the model's own forward, without the logits of more than one position."""
    mask = None
    if ids.device.type == "meta":  # the model would look into the values of its positions for packed rows
        mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device)
    with autocast:
        hidden: Tensor = base(
            input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1
        ).logits.sum()
    return hidden


def _kept(model: Any, tokens: int) -> int:
    """Return the bytes that the backward pass keeps of the forward pass of one row; without logits, where the pass makes none."""
    base = unwrap(model)
    device, half = next(base.parameters()).device, tokens // 2
    shapes_only = device.type == "meta"  # its weights lie in the products' type already

    def forward() -> Tensor:
        autocast = contextlib.nullcontext() if shapes_only else autocast_of(model, device)
        mask = torch.ones(1, half, dtype=torch.bool, device=device)
        batch = Batch([[1] * half], [[1] * half], [0], torch.zeros(1, device=device), mask)
        if LogProbs(verify=False).why_plain(model, batch) is None:
            with autocast, contextlib.suppress(NotPackable):  # found out by its attention's first call
                return packed_log_probs(model, batch)[0].sum()
        if not shapes_only:
            return plain_log_probs(model, batch, autocast=lambda: autocast)[0].sum()
        return _forward(base, torch.ones(1, tokens, dtype=torch.long, device=device), autocast)

    return saved_bytes(forward, base)


@torch.enable_grad()
def kept_per_token(model: Any, precision: Precision) -> float:
    """Return the bytes that the backward pass keeps of one token, all layers kept.

    Args:
        model: The policy, as the loop wraps it; one on the meta device has shapes only.
        precision: Its types.
    """
    base = unwrap(model)
    training, shapes_only = base.training, next(base.parameters()).device.type == "meta"
    if recomputes(base):
        base.eval()  # checkpointing is in force in training only
    per_token = _slopes.get(base) if shapes_only else None
    if per_token is None:
        # A run casts no input to the factors' float32; shapes know no autocast, so here the factors change type.
        factors = [p for name, p in base.named_parameters() if shapes_only and "lora_" in name]
        types = [(factor, factor.dtype) for factor in factors]
        for factor in factors:
            factor.data = factor.data.to(precision.compute)
        try:
            with torch.random.fork_rng(devices=[]):  # dropout draws numbers that training would draw
                long, short = (_kept(model, count) for count in (_LONG, _SHORT))
        finally:
            base.train(training)
            for factor, dtype in types:
                factor.data = factor.data.to(dtype)
        per_token = (long - short) / (_LONG - _SHORT)
        if shapes_only:
            _slopes[base] = per_token
    config = base.config.get_text_config()
    mixed = shapes_only and precision.autocast
    return per_token + MIXED_BYTES * config.hidden_size * max(1, config.num_hidden_layers) * mixed


def head_bytes(base: Any, completions: int, precision: Precision, device: torch.device) -> int:
    """Return what the head takes: probabilities or slopes, chunks of logits and gradients, or on a GPU a tile and gradients in float32."""
    weight = base.get_output_embeddings().weight
    vocabulary, width = map(int, getattr(weight, "ds_shape", weight.shape))
    learned = vocabulary * width * weight.requires_grad
    if device.type != "cpu":
        rows, columns = min(TILE_ROWS, completions), min(TILE_COLUMNS, vocabulary)
        gradients = completions * width + learned
        return rows * columns * precision.compute.itemsize + 4 * gradients
    chunk = min(CHUNK_ELEMENTS, completions * vocabulary) * 4
    own = min(CACHE_BYTES, completions * vocabulary * 4) + 2 * chunk + 4 * completions * width
    # Its weights' gradient is added to the one that they have; 16-bit products are made whole first.
    return own + (precision.compute in HALF) * precision.compute.itemsize * learned


def tokens_that_fit(
    model: Any, section: SFTSection | GRPOSection, optimizer: Any = None, *, coming: int = 0
) -> int | None:
    """Return the most tokens of one part: ``grpo.micro_batch_tokens``, or what the device's memory allows.

    Gradients, optimizer states and the products' copies of the weights are counted in before they are there, this process's part
    of them where weights are sharded; ``coming`` are further bytes. Every process must call this. None: not a GPU and not a CPU.
    """
    fixed: int | None = getattr(section, "micro_batch_tokens", None)
    base = unwrap(model)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    device = next(base.parameters()).device
    if fixed is not None or not (on_gpu(device) or device.type == "cpu"):
        return fixed

    # Before the forwards, which leave parts of a sharded model whole.
    trained = [p for p in model.parameters() if p.requires_grad]
    states = 0 if optimizer is not None and optimizer.state else state_bytes(section.optim)
    coming += sum(own_part(p).numel() * (p.element_size() * (p.grad is None) + states) for p in trained)
    precision = Precision(weight_dtype(base), compute_dtype(base))
    if not on_gpu(device):
        coming += head_bytes(base, COMPLETION_TOKENS, precision, device)
    try:
        per_token = kept_per_token(model, precision)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return 1  # not even a short row fits: each completion alone
    left = memory_left(device) - coming
    tokens = tokens_in(left, per_token, base, section, precision, device)
    stage = "sft" if isinstance(section, SFTSection) else "grpo"
    log.info("%s: one forward and backward takes up to %d tokens (%.1f GB left)", stage, tokens, left / 1e9)
    return tokens


def tokens_in(
    left: float,
    per_token: float,
    base: Any,
    section: SFTSection | GRPOSection,
    precision: Precision,
    device: torch.device,
) -> int:
    """Return how many tokens of ``per_token`` kept bytes one forward and backward may have in ``left`` bytes of a device."""
    copies, per_token = _in_one_part(per_token, base, precision, recompute=section.gradient_checkpointing)
    room = SHARE * (left - copies)
    if device.type == "cpu":
        room = min(room, PART_BYTES)
    return max(1, int(room / max(1.0, per_token)))


def _in_one_part(per_token: float, base: Any, precision: Precision, *, recompute: bool) -> tuple[int, float]:
    """Return the bytes of the products' copies of the weights in one part, and of a token, of which all layers keep ``per_token``."""
    config, copies = base.config.get_text_config(), 0
    layers = config.num_hidden_layers
    if recompute:
        per_token = config.hidden_size * layers * precision.master.itemsize + per_token / layers
    if precision.autocast:
        copies = (
            sum(getattr(p, "ds_numel", p.numel()) for p in base.parameters()) * precision.compute.itemsize
        )
        copies //= layers if recompute or is_sharded(base) else 1
    return copies, per_token


def refuse_what_cannot_fit(model: Any, recipe: Recipe, stages: Sequence[str]) -> None:
    """Refuse a stage of which even a part of one completion does not fit into what a CPU has left, before anything is sampled or trained.

    Raises:
        ConfigError: The message has the bytes, and the keys with which they fit.
    """
    base = unwrap(model)
    device = next(base.parameters()).device
    if device.type != "cpu" or is_sharded(base):
        return
    left, precision = memory_left(device), Precision(weight_dtype(base), compute_dtype(base))
    per_token = kept_per_token(model, precision)
    weights = [p for p in base.parameters() if p.dim() == 2]
    trained = [p for p in model.parameters() if p.requires_grad]

    def need(section: Any, tokens: int, *, recompute: bool, adapter: bool = False) -> float:
        """Return the bytes of a stage beside what this process holds."""
        states, kinds = state_bytes(section.optim), precision
        count = sum(p.numel() for p in trained)
        freed = 0
        if adapter:
            kinds = Precision(precision.compute, precision.compute)
            freed = count * (precision.master.itemsize - precision.compute.itemsize)
            count = sum(ADAPTER_RANK * sum(p.shape) for p in weights)
        copies, one = _in_one_part(per_token, base, kinds, recompute=recompute)
        head = 0 if adapter else head_bytes(base, tokens, kinds, device)
        return count * (4 + states) + copies + head + one * tokens - freed

    for stage in stages:
        section = getattr(recipe, stage)
        longest = min(recipe.grpo.max_completion_tokens, getattr(section, "max_length", None) or MOST)
        now = section.gradient_checkpointing
        if (most := need(section, longest, recompute=now)) <= left:
            continue
        whole = recipe.model.lora is None
        changes = {
            f"{stage}.gradient_checkpointing=true": need(section, longest, recompute=True),
            "model.lora.rank=16": need(section, longest, recompute=now, adapter=whole),
            f"model.lora.rank=16 {stage}.gradient_checkpointing=true": need(
                section, longest, recompute=True, adapter=whole
            ),
        }
        fit = [f"{keys} ({max(0.0, size) / 1e9:.2f} GB)" for keys, size in changes.items() if size <= left]
        raise ConfigError(
            f"{stage} of {recipe.model.name} takes about {most / 1e9:.2f} GB beside the weights, for gradients, optimizer states and one "
            f"completion of {longest} tokens, and this machine has {left / 1e9:.2f} GB left for it. "
            + (
                f"It fits with {', or '.join(fit)}"
                if fit
                else "No setting makes it fit: take a smaller model (model.name)"
            )
        )
