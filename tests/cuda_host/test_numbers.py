"""On CUDA's own dispatcher, autocast and kernel checks: the CPU's numbers. In place of Triton's kernels run their twins in torch."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from algorist.rollouts.base import SamplingParams
from algorist.rollouts.native import graph_tier
from algorist.rollouts.native.engine import NativeEngine
from algorist.training.batch import Batch
from algorist.training.log_probs import LogProbs, packed_log_probs
from tests.conftest import Cli
from tests.cuda.test_rollout_on_gpu import PROMPTS, compare, model
from tests.cuda.test_update_on_gpu import batch, gradient, policy
from tests.cuda_host.emulate import Emulate, numbers_of_a_replay


@pytest.fixture(autouse=True)
def numbers_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of Triton write none, and neither does a replayed graph."""
    monkeypatch.setattr(graph_tier.Step, "run", numbers_of_a_replay(graph_tier.Step.run))
    for place in (
        "rollouts.native.graph_tier",
        "rollouts.native.weights",
        "training.head_tiles",
        "models.products",
    ):
        monkeypatch.setattr(f"algorist.{place}.why_no_triton", lambda: "it writes nothing here")


@pytest.fixture
def card() -> Iterator[Emulate]:
    with Emulate() as emulation:
        yield emulation
    assert not emulation.missing, emulation.missing


TYPES: dict[str, tuple[torch.dtype, torch.dtype | None, float]] = {
    "float32": (torch.float32, None, 1e-5),
    "float32 as bfloat16": (torch.float32, torch.bfloat16, 2e-2),
    "float32 as float16": (torch.float32, torch.float16, 5e-3),
    "bfloat16": (torch.bfloat16, torch.bfloat16, 2e-2),
    "float16": (torch.float16, torch.float16, 5e-3),
}


def run(made: Any, rows: Batch, compute: torch.dtype | None) -> Tensor:
    autocast = partial(torch.autocast, "cuda", compute, enabled=compute is not None, cache_enabled=False)
    assert LogProbs().why_plain(made, rows, autocast) is None
    log_probs, entropy = packed_log_probs(made, rows, compute_entropy=True, autocast=autocast)
    assert entropy is not None
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    return log_probs.detach().cpu()


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("kind", TYPES)
def test_an_update(kind: str, lora: bool, checkpointed: bool, card: Emulate, capability: int) -> None:
    """On a T4 in bfloat16 torch refuses: the memory-efficient kernel, and products of bfloat16 with a float32 result."""
    dtype, compute, within = TYPES[kind]
    if capability < 80 and torch.bfloat16 in (dtype, compute):
        pytest.skip("refused in words: tests/unit/models/test_precision.py")
    rows, exact = batch(), policy(torch.float32, lora)
    expected = run(exact, rows, None)
    ours = policy(dtype, lora).cuda()
    if checkpointed:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
        ours.enable_input_require_grads()
    found = run(ours, rows.to("cuda"), compute)
    error = (gradient(ours).cpu() - gradient(exact)).norm() / gradient(exact).norm()
    assert error < within
    torch.testing.assert_close(found, expected, atol=50 * within, rtol=0)


@pytest.mark.parametrize("tier", ["decoder", "graph"])
def test_a_rollout(tier: str, card: Emulate) -> None:
    params, small = SamplingParams(max_new_tokens=12, seed=3), model()
    expected = NativeEngine(small, tier="decoder").generate(PROMPTS, 4, params)
    found = NativeEngine(copy.deepcopy(small).cuda(), tier=tier).generate(PROMPTS, 4, params)
    compare(found, expected, 1e-5)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "smoke-cpu/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("compute", ["float32", "auto"])
def test_a_whole_run(compute: str, call: Cli, tmp_path: Path) -> None:
    """SFT, evaluations and GRPO with a reward that differs within the groups, as the command line runs them."""
    changes = [
        "threads=1",
        "data.eval.params.count=4",
        "rewards=[{name: random, weight: 1.0}]",
        "grpo.max_completion_tokens=12",
    ]
    done = call("run", "smoke-cpu", "device=cpu", f"output_dir={tmp_path / 'cpu'}", *changes)
    assert done.returncode == 0, done.stderr
    with Emulate() as emulation:
        changes.append(f"model.compute_dtype={compute}")
        done = call("run", "smoke-cpu", "device=cuda", f"output_dir={tmp_path / 'gpu'}", *changes, "--debug")
    assert done.returncode == 0, done.stderr
    assert not emulation.missing
    expected, found = metrics(tmp_path / "cpu"), metrics(tmp_path / "gpu")
    assert [line["step"] for line in found] == [line["step"] for line in expected] == [1, 2, 1, 2]
    for ours, theirs in zip(found, expected, strict=True):
        within = 1e-4 if compute == "float32" else 3e-2
        if ours["stage"] == "sft" or compute == "float32":  # 16-bit products sample other tokens
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=within, abs=1e-4)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=within)
        assert ours["grad_norm"] > 0 and ours.get("sampling/sampling_logp_difference/max", 0) < 0.1
