"""FSDP2 in two real processes (gloo, CPU) through ``algorist launch``: SFT, GRPO, evaluations and resume as one process does them."""

from __future__ import annotations

import json
import shutil
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold ``runs/one`` by one process and ``runs/sharded`` by two that share one model."""
    path = tmp_path_factory.mktemp("fsdp2")
    (path / "reward.py").write_text(REWARD)
    run_alone(path, "run_name=one", *ONE, *CHANGES)
    sharded(path, "sharded")
    return path


def sharded(path: Path, name: str, *more: str) -> str:
    given = [f"run_name={name}", *TWO, *settings(path), *CHANGES, *more]
    return call(path, "launch", "-n", "2", "--config", "fsdp2", "smoke-cpu", *given)


def test_the_run_is_that_of_one_process(folder: Path) -> None:
    one, two = folder / "runs/one", folder / "runs/sharded"
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
    assert (two / "grpo/checkpoint-4/pytorch_model_fsdp.bin").is_file()  # it was sharded


def test_resume_goes_on_as_if_it_had_not_been_cut(folder: Path) -> None:
    run, whole = folder / "runs/again", folder / "runs/sharded"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "grpo/final")
    for later in (2, 3, 4):  # in the middle of two updates on one batch of rollouts
        shutil.rmtree(run / f"grpo/checkpoint-{later}")
    stages = json.loads((run / "stages.json").read_text())
    (run / "stages.json").write_text(json.dumps({k: v for k, v in stages.items() if "grpo" not in k}))
    said = sharded(folder, "again", "--resume")
    assert "continuing from checkpoint-1" in said and "not bit for bit" not in said
    newest = run / f"grpo/checkpoint-{STEPS}"
    assert damage(newest) == "" and processes_of(newest) == 2
    assert largest_difference(weights(run, "grpo"), weights(whole, "grpo")) == 0
    assert rollouts(run) == rollouts(whole)
