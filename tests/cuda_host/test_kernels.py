"""The decode kernels, compiled by Triton for this card as the engine starts them: what they take of a block's shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from algorist.rollouts.base import SamplingParams
from algorist.rollouts.native import graph_tier
from algorist.rollouts.native.decode_attention import StepState
from algorist.rollouts.native.engine import NativeEngine
from algorist.rollouts.native.triton_attention import TritonAttention
from tests.cuda_host.stub import model, rows_end_at_their_length

pytestmark = pytest.mark.skipif("int(__import__('os').environ['STUB_CC']) < 80", reason="decoded eagerly")
LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KB of shared memory that a block may take, by compute capability."""
SHAPES = {
    "Qwen2.5-0.5B": (14, 2, 64),
    "Qwen2.5-1.5B": (12, 2, 128),
    "phi": (32, 32, 96),
    "Gemma-2B": (8, 1, 256),
}


def state(heads: int, kv: int, dim: int, group: int, dtype: torch.dtype, slots: int = 64) -> StepState:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device="cuda")

    def cache(rows: int, times: int) -> list[torch.Tensor]:
        return [torch.empty(rows, kv, times, dim, dtype=dtype, device="cuda")]

    places = slots // group
    return StepState(
        keys=cache(slots, 512), values=cache(slots, 512), prompt_keys=cache(places, 256), prompt_values=cache(places, 256),
        position=numbers(slots), length=numbers(slots), place=numbers(slots), prompt_length=numbers(places),
        member=numbers(places, group), member_of=numbers(slots), rotation=[torch.zeros(769, dim // 2, 2, device="cuda")],
        window=[0], query_scale=0.1, eps=1e-6,
    )  # fmt: skip


@pytest.mark.parametrize("group", [8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_fit(
    shape: str, dtype: torch.dtype, group: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton itself refuses what does not fit (OutOfResources), before anything is launched."""
    compiled: list[Any] = []
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *a, **k: compiled.append(run(*a, **k)) or compiled[-1])
    heads, kv, dim = SHAPES[shape]
    qkv = torch.zeros(64, heads + 2 * kv, dim, dtype=dtype, device="cuda")
    TritonAttention(state(heads, kv, dim, group, dtype), heads).step(0, qkv, None)
    shared = [kernel.metadata.shared / 1024 for kernel in compiled]
    print(f"sm_{capability} {shape} {dtype} groups of {group}: {max(shared):.0f} KB")
    assert len(shared) == 4 and max(shared) <= LIMIT[capability]


WITHOUT_COMPILER = """
import logging, torch
logging.basicConfig(level=logging.WARNING)
from algorist.diagnosis.environment import device
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.native.engine import NativeEngine
from algorist.training.lm_head import completion_log_probs
from tests.cuda_host.stub import model, rows_end_at_their_length
with rows_end_at_their_length():
    found = NativeEngine(model("0.5B", layers=1)).generate([[5] * 20], 8, SamplingParams(max_new_tokens=9))
hidden, head = torch.zeros(5, 32, device="cuda", requires_grad=True), torch.zeros(400, 32, device="cuda")
completion_log_probs(hidden, head, None, torch.zeros(5, dtype=torch.int64, device="cuda")).log_probs.sum().backward()
print(len(found[0]), device())
"""


def test_without_a_compiler_torch_takes_over(tmp_path: Path) -> None:
    """A slim container or a fresh WSL: Triton is there and cannot build its starter. Rollouts and the update's head go on."""
    there = {key: value for key, value in os.environ.items() if key != "CC"}
    there |= {"PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    done = subprocess.run(command, env=there, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("8 CUDA") and "slower without Triton: " in done.stdout
    assert done.stderr.count("torch's own operations take their place") == 1
    assert "apt install gcc python3-dev" in done.stderr


def test_what_a_kernel_refuses_torch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever its first step says (OutOfResources is no RuntimeError)."""
    from triton.runtime.errors import OutOfResources

    def refuse(*_: Any) -> None:
        raise OutOfResources(180_000, 101_376, "shared memory")

    monkeypatch.setattr(TritonAttention, "step", refuse)
    graph_tier._say_once.cache_clear()
    with rows_end_at_their_length():
        engine = NativeEngine(model("0.5B", layers=1))
        found = engine.generate([[5] * 20], 8, SamplingParams(max_new_tokens=9, seed=0))
    assert len(found[0]) == 8
    lines = [r.getMessage() for r in caplog.records if "take their place" in r.getMessage()]
    assert len(lines) == 1 and "shared memory" in lines[0]
