"""A teacher in runs that are killed, and in two real processes (gloo, CPU): the same weights and numbers as one undisturbed process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.slow.test_two_processes import (
    NUMBERS,
    ONE,
    REWARD,
    SETTINGS,
    TWO,
    WEIGHTS,
    call,
    largest_difference,
    metrics,
    run_alone,
    weights,
)
from tests.warm import PYTHON

pytestmark = pytest.mark.slow
REFUSED = ("grpo.resample", "grpo.replay")
ALONE = ["grpo.resample=null", "grpo.replay=null"]
QUICK = ["sft.max_steps=12", "sft.save_steps=100", "eval.enabled=false"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold ``runs/teacher``, SFT of 12 steps."""
    path = tmp_path_factory.mktemp("taught")
    (path / "reward.py").write_text(REWARD)
    run_alone(path, "run_name=teacher", *ONE, *ALONE, *QUICK, "grpo.enabled=false")
    return path


def taught(folder: Path, loss: str) -> list[str]:
    return [
        *(setting for setting in SETTINGS if not setting.startswith(REFUSED)),
        f"rewards=[{{name: '{folder}/reward.py:rare'}}]",
        f"grpo.teacher={{model: '{folder}/runs/teacher', loss: {loss}, weight: 0.5}}",
        "grpo.max_steps=4",
        "grpo.save_steps=4",
        "grpo.eval_every=null",
        "eval.enabled=false",
    ]


@pytest.mark.parametrize("loss, config", [("sampled", "ddp"), ("full", "ddp"), ("full", "fsdp2")])
@pytest.mark.long
def test_two_processes_are_one(folder: Path, loss: str, config: str) -> None:
    one = folder / "runs" / f"one-{loss}"
    if not one.exists():
        run_alone(folder, f"run_name={one.name}", *ONE, *ALONE, *taught(folder, loss))
    two = folder / "runs" / f"two-{loss}-{config}"
    ways = ["run", "-n", "2", "--launch", config, "smoke-cpu", f"run_name={two.name}"]
    call(folder, *ways, *TWO, *taught(folder, loss))
    assert largest_difference(weights(one, "grpo"), weights(two, "grpo")) <= 2 * WEIGHTS
    assert largest_difference(weights(one, "sft"), weights(one, "grpo")) > 100 * WEIGHTS
    lines = [[row for row in metrics(run) if "teacher/reverse_kl" in row] for run in (one, two)]
    assert len(lines[0]) == len(lines[1]) > 0
    for first, second in zip(*lines, strict=True):
        for name in ("teacher/reverse_kl", "teacher/log_prob", "grad_norm"):
            assert second[name] == pytest.approx(first[name], abs=NUMBERS)


@pytest.mark.long
@pytest.mark.parametrize("loss", ["sampled", "full"])
def test_killed_and_resumed_is_the_same_run(tmp_path: Path, loss: str) -> None:
    done = subprocess.run(
        [PYTHON, "-m", "tests.slow.kill_runs", "--kills", "4", "--folder", str(tmp_path), "--seed", "3", "--teacher", loss],
        capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["different"] == [] and result["kills"] >= 4 and result["taught_steps"] > 0, result
