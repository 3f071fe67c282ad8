"""How much memory a stage needs at its peak, part by part, and how much it took.

Weights, gradients, optimizer states and the KV cache follow from shapes. What the backward pass keeps of the forward pass is
counted on a short real forward (the bytes that autograd saves, per token) and scaled to the longest batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from algorist.training.batch import Batch
from algorist.training.head import CACHE_BYTES, CHUNK_ELEMENTS
from algorist.training.log_probs import LogProbs, packed_log_probs, recomputes, unwrap

HOLES, ADAPTER_HOLES = 0.1, 0.4
"""Memory that the C allocator keeps in holes between what stays and what is freed, as a share of the activations (CPU only;
measured with benchmarks/memory_plan.py: adapters make several short-lived tensors in each layer)."""


_slopes: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()
"""Bytes per token of models that are shapes only and never change."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes at the peak of a stage. ``base`` is what the process holds already, weights included (device: weights only)."""

    base: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    kv_cache: int
    allocator: int = 0

    @property
    def peak(self) -> int:
        """Rollouts and updates take turns: the larger of the two counts."""
        kept = self.base + self.optimizer
        return kept + max(self.gradients + self.activations + self.allocator + self.logits, self.kv_cache)

    def as_dict(self) -> dict[str, int]:
        """Return the parts and the peak in bytes."""
        return {**asdict(self), "peak": self.peak}


@dataclass(frozen=True, slots=True)
class Shape:
    """The largest batch of a stage: rows of one forward, distinct prompts, tokens of a prompt and of a completion.

    ``total_tokens`` is what all completions hold together where they are not padded.
    """

    rows: int
    prompts: int
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int = 0


def saved_bytes(forward: Callable[[], Tensor], model: nn.Module) -> int:
    """Return the bytes that autograd keeps for the backward pass of ``forward``, each storage once, without weights."""

    def place(tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        return storage.data_ptr() or int(
            storage._cdata
        )  # a model of shapes only (meta device) has no addresses

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


def plan_sft(
    model: Any, shape: Shape, *, base_bytes: int | None = None, recompute: bool | None = None
) -> MemoryPlan:
    """Return the plan of an SFT step: padded rows through the model's own forward, the head at completions only.

    Args:
        model: The policy; one on the meta device has shapes only.
        shape: The largest micro-batch.
        base_bytes: What is taken before the step, weights included; what this process takes now when left out.
        recompute: Plan with gradient checkpointing, or without; as the model is set when left out.
    """
    base = unwrap(model)
    vocabulary = _head(base)

    def kept(tokens: int) -> int:
        ids = torch.randint(0, vocabulary, (1, tokens), device=next(base.parameters()).device)
        # The logits are left to their own line.
        return saved_bytes(lambda: _forward(base, ids), base)

    tokens = shape.rows * (shape.prompt_tokens + shape.completion_tokens)
    completions = shape.total_tokens or shape.rows * shape.completion_tokens
    activations = _activations(base, kept, tokens, recompute)
    return _plan(model, activations, _head_bytes(completions, vocabulary), 0, base_bytes)


def plan_grpo(
    model: Any,
    shape: Shape,
    *,
    fast_update: bool,
    group_rows: int,
    length: int,
    base_bytes: int | None = None,
    recompute: bool | None = None,
) -> MemoryPlan:
    """Return the plan of a GRPO step.

    Args:
        model: The policy.
        shape: The largest micro-batch of the update.
        fast_update: Whether prompts are shared and the head runs at completion positions only.
        group_rows: Rows that are sampled at once.
        length: Tokens of the longest sequence.
        base_bytes: As for ``plan_sft``.
        recompute: As for ``plan_sft``; gradient checkpointing turns the fast update off.
    """
    base = unwrap(model)
    vocabulary = _head(base)
    device = next(base.parameters()).device
    shapes_only = device.type == "meta"
    fast_update = fast_update and not (recomputes(base) if recompute is None else recompute)

    def kept(tokens: int) -> int:
        ids = torch.randint(0, vocabulary, (1, tokens), device=device)
        half = tokens // 2
        mask = torch.ones(1, half, dtype=torch.bool, device=device)

        def forward() -> Tensor:
            if fast_update and not shapes_only:
                row = ids[0].tolist()
                batch = Batch([row[:-half]], [row[-half:]], [0], torch.zeros(1, device=device), mask)
                if LogProbs(verify=False).why_plain(base, batch) is None:
                    return packed_log_probs(base, batch)[0].sum()
            return _forward(base, ids)

        return saved_bytes(forward, base)

    completions = shape.rows * shape.completion_tokens
    if fast_update:
        completions = shape.total_tokens or completions
        tokens = shape.prompts * shape.prompt_tokens + completions
        logits = _head_bytes(completions, vocabulary)
    else:
        tokens = shape.rows * shape.prompt_tokens + completions
        logits = 3 * 4 * completions * vocabulary
    cache = group_rows * length * _cache_bytes(base) + 3 * 4 * group_rows * vocabulary
    return _plan(model, _activations(base, kept, tokens, recompute), logits, cache, base_bytes)


def _forward(base: Any, ids: Tensor) -> Tensor:
    """Return something to differentiate from the model's own forward, without the logits of more than one position."""
    mask = None
    if ids.device.type == "meta":  # the model would look into the values of its positions for packed rows
        mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device)
    found: Tensor = base(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1).logits.sum()
    return found


def _activations(base: Any, kept: Callable[[int], int], tokens: int, recompute: bool | None) -> int:
    """Return what the forward pass keeps for the backward pass of ``tokens`` tokens (bytes).

    With gradient checkpointing that is each layer's input, and everything inside one layer at a time.
    """
    was, on = base.training, recomputes(base)
    recompute = on if recompute is None else recompute
    if on:
        base.eval()  # checkpointing is in force in training only
    try:
        per_token = _slopes.get(base)
        if per_token is None:
            per_token = _slope(kept)
            if next(base.parameters()).device.type == "meta":
                _slopes[base] = per_token
        every = int(per_token * tokens)
    finally:
        base.train(was)
    if not recompute:
        return every
    config = base.config.get_text_config()
    layers = max(1, int(config.num_hidden_layers))
    return (
        tokens * int(config.hidden_size) * layers * next(base.parameters()).element_size() + every // layers
    )


def _plan(
    model: nn.Module, activations: int, logits: int, cache: int, base_bytes: int | None = None
) -> MemoryPlan:
    trained = [p for p in model.parameters() if p.requires_grad]
    size = sum(p.numel() * p.element_size() for p in trained)
    # The backward pass holds the gradient of a layer's widest tensors beside what was kept: about a layer's worth.
    layers = max(1, int(getattr(unwrap(model).config, "num_hidden_layers", 1)))
    adapter = len(trained) < sum(1 for _ in model.parameters())
    holes = 0.0 if torch.cuda.is_available() else ADAPTER_HOLES if adapter else HOLES
    activations += activations // layers
    taken = memory_now() if base_bytes is None else base_bytes
    return MemoryPlan(taken, size, 2 * size, activations, logits, cache, allocator=int(holes * activations))


def _slope(kept: Callable[[int], int], short: int = 32, long: int = 96) -> float:
    return (kept(long) - kept(short)) / (long - short)


def _head_bytes(completions: int, vocabulary: int) -> int:
    """Return what the chunked head takes: probabilities that are kept, and two chunks of logits."""
    chunk = min(CHUNK_ELEMENTS, completions * vocabulary) * 4
    kept = completions * vocabulary * 4
    return (kept if kept <= CACHE_BYTES else 0) + 2 * chunk


def _head(base: Any) -> int:
    return int(base.get_output_embeddings().weight.shape[0])


def _cache_bytes(base: Any) -> int:
    """Return the KV cache of one token in bytes."""
    config = base.config.get_text_config()
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return 2 * int(config.num_hidden_layers) * heads * width * next(base.parameters()).element_size()


def memory_now() -> int:
    """Return what is taken now: of the GPU where there is one, else the resident memory of this process.

    What was freed but is still with the allocator is given back first: the next stage would use it again.
    """
    gc.collect()
    if torch.cuda.is_available():
        return int(torch.cuda.memory_allocated())
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


def memory_limit() -> int | None:
    """Return the memory of the device in bytes; None where the system does not say."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    found = Path("/proc/meminfo")
    if not found.is_file():
        return None
    values = dict(line.split(":") for line in found.read_text().splitlines())
    limit = int(values["MemTotal"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup/memory.max")
    if group.is_file() and group.read_text().strip().isdigit():
        limit = min(limit, int(group.read_text()))
    return limit


def reset_peak() -> None:
    """Forget the highest value so far."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Return the highest value since ``reset_peak``, in bytes."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return _status("VmHWM")


def _status(name: str) -> int:
    found = Path("/proc/self/status")
    if found.is_file():
        for line in found.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    # macOS counts bytes, Linux kilobytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
