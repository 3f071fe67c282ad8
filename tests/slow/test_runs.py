"""The whole job in real processes: SFT → GRPO → evaluation learns; real GSM8K rows; resume; solve."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet
import pytest

from tests.conftest import Cli
from tests.warm import PYTHON

# The quickstart without the sampled evaluation and with a quarter of its GRPO steps.
STEPS = 28
LEARN = ["eval.samples=0", f"grpo.max_steps={STEPS}", "seed=3"]


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def check_advantages_and_losses(run: Path, *, longest: int) -> None:
    """Compare with what follows from the stored rewards and lengths alone: Dr. GRPO (2503.20783), every step on its own policy.

    The ratio is 1 there, so a step's loss is minus the mean over completions of advantage times length / ``longest``. An optimiser
    that divides by the gradient's size learns nearly as well with a wrong denominator: this sees it.
    """
    groups = defaultdict(list)
    for row in pyarrow.parquet.read_table(run / "rollouts").to_pylist():
        groups[row["step"], row["group"]].append(row)
    terms: dict[int, list[float]] = defaultdict(list)
    for (step, _), rows in groups.items():
        mean = sum(row["reward"] for row in rows) / len(rows)
        for row in rows:
            assert row["advantage"] == pytest.approx(row["reward"] - mean, abs=1e-6)
            terms[step].append(-(row["reward"] - mean) * row["completion_tokens"] / longest)
    logged = {m["step"] - 1: m["loss"] for m in metrics(run) if m["stage"] == "grpo" and "loss" in m}
    assert logged.keys() == terms.keys()
    for step, values in terms.items():
        assert logged[step] == pytest.approx(sum(values) / len(values), rel=1e-3, abs=1e-6), step


@pytest.mark.long
@pytest.mark.slow
def test_the_whole_job_learns(cli: Cli, tmp_path: Path) -> None:
    done = cli("run", "quickstart", *LEARN, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "quickstart"
    before = json.loads((run / "eval" / "sft.json").read_text())["metrics"]["greedy_accuracy"]
    after = json.loads((run / "eval" / "grpo.json").read_text())["metrics"]["greedy_accuracy"]
    assert after["value"] >= before["value"] + 0.15, (before, after)
    assert after["low"] > before["high"], (before, after)
    rows = pyarrow.parquet.read_table(run / "rollouts").to_pylist()
    assert len(rows) == STEPS * 128  # every rollout of every step
    assert {r["step"] for r in rows} == set(range(STEPS))
    assert all(
        r["reward"] == pytest.approx(r["correct"] + 0.2 * dict(r["rewards"])["well_formed"]) for r in rows
    )
    check_advantages_and_losses(run, longest=80)
    solved = cli("solve", "--json", "Tom has 9 pens. Tom loses 4. How many pens does Tom have now?")
    (answer,) = json.loads(solved.stdout)["answers"]
    assert answer["well_formed"] and answer["answer"].isdigit()
    piped = cli("solve", "--json", stdin="Tom has 9 pens. Tom loses 4.\n\nMia has 3 eggs. Mia gets 4 more.\n")
    assert len(json.loads(piped.stdout)["answers"]) == 2


@pytest.mark.long
def test_real_gsm8k_rows_and_a_model_folder_by_path(cli: Cli, tmp_path: Path, real_data: Path) -> None:
    data = [
        "data.train={name: gsm8k, path: '%s', limit: 64}" % (real_data / "gsm8k/train.jsonl"),
        "data.sft=null",
        "data.eval={name: gsm8k, path: '%s', split: test, limit: 8}" % (real_data / "gsm8k/test.jsonl"),
        "model.tiny={hidden_size: 32, layers: 2, vocab_size: 600, max_position_embeddings: 1024}",
        "sft.max_length=768",
        "sft.batch_size=4",
        "grpo.max_completion_tokens=16",
    ]
    done = cli("run", "smoke-cpu", *data, "run_name=gsm8k")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "64 training problems" in done.stdout
    folder = tmp_path / "runs/gsm8k/grpo/final"
    assert {p.name for p in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    again = cli(
        "run", "smoke-cpu", *data[:3], *data[4:], f"model.name={folder}", "run_name=second", "--only", "grpo"
    )
    assert again.returncode == 0, again.stdout + again.stderr


def test_ctrl_c_saves_and_resume_finishes(cli: Cli, tmp_path: Path) -> None:
    arguments = ["run", "smoke-cpu", "sft.max_steps=30", "run_name=stopped", "eval.enabled=false"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [PYTHON, "-m", "algorist.cli.main", *arguments]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment)
    run = tmp_path / "runs" / "stopped"
    deadline = time.monotonic() + 120
    while not list(run.glob("sft/checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "Continue: algorist run smoke-cpu" in output and "--resume" in output
    assert not (run / "sft" / "final").exists()
    refused = cli(*arguments)
    assert refused.returncode == 2 and "already holds a run" in refused.stderr
    other = cli(*arguments, "sft.learning_rate=1e-5", "--resume")
    assert other.returncode == 2 and "sft.learning_rate" in other.stderr
    done = cli(*arguments, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continuing from checkpoint-" in done.stdout
    steps = [m["step"] for m in metrics(run) if m["stage"] == "sft" and "loss" in m]
    assert steps == list(range(1, 31))  # nothing lost, nothing doubled


def test_data_check_on_every_gsm8k_gold(call: Cli, real_data: Path) -> None:
    for split in ("train", "test"):
        done = call("data", "check", "gsm8k", "--path", str(real_data / "gsm8k"), "--split", split, "--json")
        found = json.loads(done.stdout)
        assert (found["problems"], found["unreadable"]) == (80, [])
