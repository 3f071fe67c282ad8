"""FSDP2 and DeepSpeed in two real processes (gloo, CPU) through ``algorist run -n 2``: SFT, GRPO, evaluations and resume as one process does them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from algorist.training.checkpoint import damage, processes_of
from tests.slow.test_two_processes import (
    NUMBERS,
    ONE,
    REWARD,
    TWO,
    WEIGHTS,
    call,
    largest_difference,
    metrics,
    rollouts,
    run_alone,
    settings,
    weights,
)

pytestmark = pytest.mark.slow
STEPS = 4
# Parts of few tokens: the processes need unequal numbers of forward passes, and each pass gathers weights from both.
CHANGES = [f"grpo.max_steps={STEPS}", "grpo.micro_batch_tokens=90", "grpo.eval_every=3"]


# DeepSpeed comes without its kernels; accelerate and transformers would load it in every process that finds it, so it is not
# among the project's own packages. What it needs beyond them:
DEEPSPEED = ("deepspeed>=0.19,<0.20", "einops", "hjson", "msgpack", "ninja", "py-cpuinfo")
# The file of a checkpoint in which the parts of several processes lie.
SHARDED = {"fsdp2": "pytorch_model_fsdp.bin", "zero2": "global_step4", "zero3": "global_step4"}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold ``runs/one`` by one process."""
    path = tmp_path_factory.mktemp("sharded")
    (path / "reward.py").write_text(REWARD)
    run_alone(path, "run_name=one", *ONE, *CHANGES)
    return path


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install DeepSpeed into a folder of its own."""
    path = tmp_path_factory.mktemp("deepspeed")
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--target", str(path), *DEEPSPEED], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module", params=list(SHARDED))
def config(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name the configuration; its package can be imported by the processes that are started."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "fsdp2":
            path = request.getfixturevalue("deepspeed")
            patch.setenv("PYTHONPATH", str(path))
            patch.setenv("PATH", f"{path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        yield request.param


@pytest.fixture(scope="module")
def folder(one: Path, config: str) -> Path:
    """Hold ``runs/one`` by one process and ``runs/CONFIG`` by two that share one model."""
    sharded(one, config, config)
    return one


def sharded(path: Path, config: str, name: str, *more: str) -> str:
    given = [f"run_name={name}", *TWO, *settings(path), *CHANGES, *more]
    return call(path, "run", "-n", "2", "--launch", config, "smoke-cpu", *given)


def test_the_run_is_that_of_one_process(folder: Path, config: str) -> None:
    one, two = folder / "runs/one", folder / "runs" / config
    for stage in ("sft", "grpo"):
        assert largest_difference(weights(one, stage), weights(two, stage)) <= WEIGHTS
    assert largest_difference(weights(one, "sft"), weights(one, "grpo")) > 100 * WEIGHTS  # GRPO did learn
    lines = [[row for row in metrics(run) if "grad_norm" in row] for run in (one, two)]
    for first, second in zip(*lines, strict=True):
        for name in ("loss", "grad_norm"):
            assert second[name] == pytest.approx(first[name], abs=NUMBERS), (first, second)
    first, second = rollouts(one), rollouts(two)
    assert [{**r, "advantage": 0} for r in first] == [{**r, "advantage": 0} for r in second]
    for name in ("sft", "grpo-step-3", "grpo"):
        found = [json.loads((run / f"eval/{name}.json").read_text())["metrics"] for run in (one, two)]
        assert found[0] == found[1]
    said = (two / "training.log").read_text()
    assert "packed log-prob pass is off" not in said
    assert (two / f"grpo/checkpoint-{STEPS}" / SHARDED[config]).exists()


FULL = """
import os
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

plain, seen = Qwen3MLP.forward, dict.fromkeys(("forward", "backward"), 0)

def runs_out(where, *times):
    seen[where] += 1
    if os.environ["RANK"] == "1" and seen[where] in times:
        raise torch.OutOfMemoryError(f"CUDA out of memory, {where}")

def forward(self, x):
    if x.requires_grad and len(x) == 1:  # in the packed pass, not in SFT
        runs_out("forward", 4)
        x.register_hook(lambda _: runs_out("backward", 8))
    return plain(self, x)

Qwen3MLP.forward = forward
"""


@pytest.mark.parametrize("config", ["fsdp2"], indirect=True)
def test_out_of_memory_in_one_process_halves_the_parts_of_all(folder: Path, config: str) -> None:
    """In the middle of a forward and of a backward pass; the other process learns of it after the pass."""
    (folder / "full.py").write_text(FULL)
    said = sharded(folder, config, "full", f"plugins=[{folder}/full.py]", "grpo.micro_batch_tokens=1000")
    log = (folder / "runs/full/training.log").read_text()
    assert log.count("same mathematics") == 2, said
    assert (
        largest_difference(weights(folder / "runs/one", "grpo"), weights(folder / "runs/full", "grpo"))
        <= WEIGHTS
    )


@pytest.mark.parametrize("config", ["fsdp2", "zero3"], indirect=True)  # zero2's checkpoints are zero3's
def test_resume_goes_on_as_if_it_had_not_been_cut(folder: Path, config: str) -> None:
    run, whole = folder / f"runs/again-{config}", folder / "runs" / config
    shutil.copytree(whole, run)
    shutil.rmtree(run / "grpo/final")
    for later in (2, 3, 4):  # in the middle of two updates on one batch of rollouts
        shutil.rmtree(run / f"grpo/checkpoint-{later}")
    stages = json.loads((run / "stages.json").read_text())
    (run / "stages.json").write_text(json.dumps({k: v for k, v in stages.items() if "grpo" not in k}))
    said = sharded(folder, config, f"again-{config}", "--resume")
    assert "continuing from checkpoint-1" in said and "not bit for bit" not in said
    newest = run / f"grpo/checkpoint-{STEPS}"
    assert damage(newest) == "" and processes_of(newest) == 2
    assert largest_difference(weights(run, "grpo"), weights(whole, "grpo")) == 0
    assert rollouts(run) == rollouts(whole)
