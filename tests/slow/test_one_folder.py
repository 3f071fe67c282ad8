"""One run folder and several commands: who came second writes nothing; a run that failed before its first step may begin again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from algorist.config import load_recipe
from algorist.errors import CheckpointError
from algorist.runs.draft import Draft
from algorist.runs.pipeline import run_plan, run_recipe
from algorist.runs.plan import make_plan
from algorist.store.run_folder import RunFolder
from algorist.store.run_log import Quiet
from tests.conftest import Cli
from tests.marks import first
from tests.warm import PYTHON

SETTINGS = ["run", "smoke-cpu", "run_name=r", "sft.max_steps=1", "grpo.max_steps=1", "eval.enabled=false"]
BROKEN = """from algorist import Extension, extension


@extension
class Mine(Extension):
    name = "mine"

    def batch(self, batch, policy):
        raise KeyError("my bug")
"""


def start(folder: Path, *settings: str) -> subprocess.Popen[str]:
    """Start a run in a process of its own."""
    command = [PYTHON, "-m", "algorist.cli.main", *SETTINGS, *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def seeds(run: Path) -> tuple[int, int]:
    """Return the seed of the record, in both of its files."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    return config["seed"], json.loads((run / "environment.json").read_text())["seed"]


def test_a_refused_second_run_leaves_the_record_of_the_first(cli: Cli, tmp_path: Path) -> None:
    run, first = tmp_path / "runs" / "r", start(tmp_path, "seed=101")
    deadline = time.monotonic() + 120
    while not (run / "config.yaml").exists() and time.monotonic() < deadline:
        time.sleep(0.003)
    first.send_signal(signal.SIGSTOP)  # before its first step: as one that loads a large model
    try:
        assert RunFolder(run).is_running() and not RunFolder(run).has_begun()
        second = cli(*SETTINGS, "seed=202")
        refusals = ("is in use by process", "already holds a run")  # a stopped process may be a step further
        assert second.returncode == 2 and any(text in second.stderr for text in refusals), second.stderr
        assert seeds(run) == (101, 101)
    finally:
        first.send_signal(signal.SIGCONT)
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 0, output
    assert seeds(run) == (101, 101)
    wrong = cli(*SETTINGS, "seed=202", "--resume")
    assert wrong.returncode == 2 and "seed: 101 in the run, 202 now" in wrong.stderr
    right = cli(*SETTINGS, "seed=101", "--resume")
    assert right.returncode == 0, right.stdout + right.stderr


def test_of_runs_that_start_at_once_one_is_done_and_recorded(tmp_path: Path) -> None:
    runs = {seed: start(tmp_path, f"seed={seed}") for seed in (101, 202, 303)}
    outputs = {seed: process.communicate(timeout=240)[0] for seed, process in runs.items()}
    codes = {seed: process.returncode for seed, process in runs.items()}
    assert sorted(codes.values()) == [0, 2, 2], outputs
    (winner,) = (seed for seed, code in codes.items() if code == 0)
    assert seeds(tmp_path / "runs" / "r") == (winner, winner)
    for seed, output in outputs.items():
        assert seed == winner or "is in use by process" in output or "already holds a run" in output, output


def test_a_run_that_was_finished_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    settings = [
        "sft.enabled=false",
        "grpo.max_steps=1",
        "eval.enabled=false",
        "run_name=r",
        f"output_dir={tmp_path}",
    ]
    late = make_plan(Draft.of(load_recipe("smoke-cpu", [*settings, "seed=202"]).recipe))
    run = run_recipe(load_recipe("smoke-cpu", [*settings, "seed=101"]).recipe, display=Quiet()).folder.path
    with pytest.raises(CheckpointError, match=r"already holds a run\. .*run_name=r-2"):
        run_plan(late, display=Quiet())
    assert seeds(run) == (101, 101)


@pytest.mark.parametrize("evaluated", first(1, ["eval.enabled=true", "eval.enabled=false"]))
def test_a_run_that_failed_in_its_first_batch_begins_again(cli: Cli, tmp_path: Path, evaluated: str) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(BROKEN)
    command = [*SETTINGS, "plugins=[mine.py]", "sft.enabled=false", evaluated]
    failed = cli(*command)
    assert failed.returncode == 2 and "mine.py:9" in failed.stderr and "my bug" in failed.stderr
    mine.write_text(BROKEN.replace('raise KeyError("my bug")', "return batch"))
    done = cli(*command)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "r"
    assert (run / "files" / "mine.py").read_text() == mine.read_text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1]
    assert cli(*command).returncode == 2  # now there is something to keep


def test_finished_sft_goes_on_with_a_corrected_plugin(cli: Cli, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(BROKEN)
    command = [*SETTINGS, "plugins=[mine.py]"]
    assert "my bug" in cli(*command).stderr
    mine.write_text(BROKEN.replace('raise KeyError("my bug")', "return batch"))
    assert "already holds a run" in cli(*command).stderr
    refused = cli(*command, "--resume")
    words = "run_name=NAME; from its finished SFT: "
    assert refused.returncode == 2 and words in refused.stderr
    own = refused.stderr.partition(words)[2].split()[:2]
    done = cli(*command, *own, "run_name=second")
    assert done.returncode == 0, done.stderr
