"""Bytes of new tensors that an update writes: 1.5B, one part of 68,000 tokens, recomputed layers; all weights, and an adapter; each
without Liger's kernels and with them.

``FOLDER/python 90 80 -W ignore -m tests.cuda_host.written``, FOLDER being that of ``make test-cuda-host``. Each new tensor is
written once and mostly read once: the memory's share of an update's time.
"""

from __future__ import annotations

import itertools

import torch

from algorist.config.section import LoraSection
from algorist.extensions.liger import fuse
from algorist.models.load import add_lora
from algorist.models.precision import autocast_of, set_compute
from algorist.training.batch import Batch
from algorist.training.log_probs import packed_log_probs
from tests.cuda_host.stub import Stub, model

PROMPTS, GROUP, PROMPT, COMPLETION = 16, 8, 190, 512


def written(kind: str, layers: int | None = None, *, fused: bool = False) -> tuple[float, int, int]:
    """Return GB of new tensors and launches of an update, and its tokens."""
    adapter = kind == "adapter"
    policy = model("1.5B", torch.bfloat16 if adapter else torch.float32, layers)
    set_compute(policy, torch.bfloat16)
    undo = fuse(policy) if fused else None
    if adapter:
        policy = add_lora(policy, LoraSection(rank=32, alpha=32, target_modules="all-linear"))
    policy.train()
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    policy.enable_input_require_grads()
    rows = PROMPTS * GROUP
    prompt_of = [row // GROUP for row in range(rows)]
    mask = torch.ones(rows, COMPLETION, dtype=torch.bool, device="cuda")
    batch = Batch([[5] * PROMPT] * PROMPTS, [[6] * COMPLETION] * rows, prompt_of, mask[:, 0].float(), mask)
    stub = Stub()
    stub.reset()
    before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
    found, _ = packed_log_probs(
        policy, batch, compute_entropy=True, autocast=lambda: autocast_of(policy, mask.device)
    )
    found.sum().backward()
    if undo:
        undo()
    size = torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - before
    return size / 1e9, stub.get("launches"), batch.packed_tokens(range(rows))


def main() -> None:
    for kind, fused in itertools.product(("all weights", "adapter"), (False, True)):
        size, launches, tokens = written(kind, fused=fused)
        name = f"{kind}, Liger" if fused else kind
        print(f"{name}: {size:,.0f} GB of new tensors, {launches:,} launches, {tokens:,} tokens", flush=True)


if __name__ == "__main__":
    main()
