"""``algorist eval`` in real processes: several benchmarks in one call, killed and continued, exported, as one JSON object."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from algorist.cli.eval_command import app
from algorist.config.load import load_recipe
from algorist.errors import ConfigError
from algorist.evaluation.artifact import read_artifact
from algorist.runs.pipeline import run_recipe
from algorist.store.read import rollouts
from tests.warm import PYTHON

TINY = "model.tiny={hidden_size: 64, layers: 2, vocab_size: 300, max_position_embeddings: 1024}"
SMALL = (
    TINY,
    "threads=1",
    "sft.max_steps=1",
    "grpo.max_steps=4",
    "grpo.eval_every=1",
    "grpo.logging_steps=1",
    "data.eval.params={count: 48, seed: 3}",
    "eval.batch_size=2",
    "eval.max_completion_tokens=24",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with evaluations during GRPO."""
    folder = tmp_path_factory.mktemp("eval")
    return run_recipe(
        load_recipe("smoke-cpu", [*SMALL, f"output_dir={folder}", "run_name=r"]).recipe
    ).folder.path


def evaluate(*words: str) -> None:
    """Call ``algorist eval`` in this process."""
    assert app(list(words), standalone_mode=False) == 0


def samples(folder: Path, name: str) -> list[dict[str, Any]]:
    found = read_artifact(folder, name).samples
    return [{key: value for key, value in row.items() if key != "seconds"} for row in found]


def own(folder: Path) -> Path:
    """Own problems with subject and level."""
    file = folder / "own.jsonl"
    rows = [
        {
            "question": f"{n} + {n}?",
            "answer": str(2 * n),
            "subject": ("sums", "doubles")[n % 2],
            "level": n % 3,
        }
        for n in range(5)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.mark.long
def test_several_benchmarks_by_subject_and_level(
    run: Path, tmp_path: Path, shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gsm8k, math500 = shared_data / "gsm8k" / "test.jsonl", shared_data / "math500" / "test.jsonl"
    words = (
        *(str(run), "--data", f"gsm8k,path={gsm8k},limit=3", "--data", f"math500,path={math500}"),
        *(
            "--data",
            str(own(tmp_path)),
            "--limit",
            "4",
            "--protocol",
            "sampled-2",
            "--by",
            "subject",
            "--by",
            "level",
        ),
        *("--export", "lm-eval", str(tmp_path / "lm"), "--out", str(tmp_path / "out"), "--json"),
    )
    evaluate(*words)
    told = json.loads(capsys.readouterr().out)
    assert [(e["dataset"], e["n"]) for e in told["evaluations"]] == [
        ("gsm8k", 3),
        ("math500", 4),
        ("local", 4),
    ]
    assert {e["protocol"]["name"] for e in told["evaluations"]} == {"sampled-2@1"}
    names = [Path(e["artifact"]).stem for e in told["evaluations"]]
    assert names == ["grpo-final-gsm8k-test", "grpo-final-math500-test", "grpo-final-own"]
    for entry, name in zip(told["evaluations"], names, strict=True):
        rows = samples(tmp_path / "out", name)
        assert len(rows) == 3 * entry["n"] and {"reward", "pass@2", "maj@2"} <= set(entry["metrics"])
        exported = [json.loads(line) for line in Path(entry["export"]).read_text().splitlines()]
        assert {r["doc_id"] for r in exported} == set(range(entry["n"]))
    by = told["evaluations"][2]["by"]
    assert {value: found["greedy_accuracy"]["n"] for value, found in by["subject"].items()} == {
        "sums": 2,
        "doubles": 2,
    }
    assert {value: found["greedy_accuracy"]["n"] for value, found in by["level"].items()} == {
        "0": 2,
        "1": 1,
        "2": 1,
    }
    evaluate(*words[:-1])  # nothing is done twice; as text
    shown = capsys.readouterr().out
    assert shown.count("already evaluated") == 3 and "greedy accuracy by subject" in shown


def test_a_killed_evaluation_continues_and_ends_the_same(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (str(run), "--protocol", "sampled-4", "--name", "x", "--json", "--out")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    evaluate(*words, str(whole))
    expected = json.loads(capsys.readouterr().out)["evaluations"][0]["metrics"]
    progress = killed / "x.progress.jsonl"
    command = [PYTHON, "-m", "algorist.cli.main", "eval", *words, str(killed)]
    victim = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    while victim.poll() is None and not (progress.is_file() and progress.read_bytes().count(b"\n") >= 4):
        time.sleep(0.002)
    os.kill(victim.pid, signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL, "it was over before it could be killed"
    assert not (killed / "x.json").exists()
    done = [json.loads(line) for line in progress.read_bytes().split(b"\n")[1:-1]]
    assert 3 <= len(done) < 24
    evaluate(*words, str(killed))
    assert json.loads(capsys.readouterr().out)["evaluations"][0]["metrics"] == expected
    assert samples(killed, "x") == samples(whole, "x") and len(samples(whole, "x")) == 48 * 5
    times = {row["problem_id"]: row["seconds"] for row in read_artifact(killed, "x").samples}
    kept = {row["problem_id"]: row["seconds"] for batch in done for row in batch["rows"]}
    assert {problem: times[problem] for problem in kept} == kept  # taken over, not done again
    assert not progress.exists()


def test_what_a_run_trained_on_is_no_test(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = sorted({row["question"] for row in rollouts(run, limit=None)})[:3]
    rows = [{"question": question.upper(), "answer": "1"} for question in trained]
    file = tmp_path / "mixed.jsonl"
    file.write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"question": "9 + 9?", "answer": "18"}])
    )
    evaluate(str(run), "--data", str(file), "--protocol", "greedy", "--out", str(tmp_path / "out"))
    told = capsys.readouterr().out
    for folder in ("one", "two"):  # two models of one name, and the first again
        shutil.copytree(run / "grpo" / "final", tmp_path / folder / "final")
        evaluate(
            str(tmp_path / folder / "final"),
            "--data",
            str(file),
            "--protocol",
            "greedy",
            "--out",
            str(tmp_path / "two"),
        )
    evaluate(
        str(tmp_path / "one" / "final"),
        "--data",
        str(file),
        "--protocol",
        "greedy",
        "--out",
        str(tmp_path / "two"),
    )
    assert "already evaluated" in capsys.readouterr().out
    assert len([*(tmp_path / "two").glob("*.json")]) == 2
    assert "3 of 4 held-out problems are also in the training data, such as: " in told


def test_wrong_words_are_refused_before_the_model_is_loaded(run: Path) -> None:
    for words, message in (
        (("--data", "gsm8j"), "Did you mean 'gsm8k'"),
        (("--protocol", "gredy"), "Did you mean 'greedy'"),
        (("--by", "subjekt"), "Did you mean 'subject'"),
        (("--export", "helm", "x"), "unknown export 'helm'. Known: inspect, lm-eval"),
        (("--path", "x.jsonl"), "--data NAME --path x.jsonl"),
        (("--data", "gsm8k", "--data", "math", "--name", "x"), "would name 2 artifacts"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            app([str(run), *words], standalone_mode=False)


def test_evaluations_during_training_are_told(run: Path) -> None:
    """The numbers in the log and in metrics.jsonl, the trend at the end."""
    log = (run / "training.log").read_text(encoding="utf-8")
    for name in ("sft", "grpo-step-1", "grpo-step-2", "grpo-step-3", "grpo"):
        line = next(line for line in log.splitlines() if f"eval {name}: accuracy" in line)
        for told in (
            "format",
            "reasoning present",
            "reasoning 0 characters",
            "tokens",
            "reward",
            "correct",
            "pass@2",
        ):
            assert told in line
    assert "trend of 5 evaluations: accuracy first" in log
    rows = rollouts(run, limit=None)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    during = [row for row in lines if "eval/greedy_accuracy" in row]
    assert [row["step"] for row in during] == [1, 2, 3]
    for row in during:
        summary = read_artifact(run / "eval", f"grpo-step-{row['step']}").metrics
        for name in (
            "reasoning_present",
            "mean_reasoning_characters",
            "reward",
            "rewards/correct",
            "rewards/well_formed",
        ):
            assert row[f"eval/{name}"] == summary[name].value
    steps = {row["step"]: row for row in lines if row["stage"] == "grpo" and "loss" in row}
    for step in range(1, 5):
        rewards = [row["reward"] for row in rows if row["step"] == step - 1]
        assert (steps[step]["reward_min"], steps[step]["reward_max"]) == (min(rewards), max(rewards))
        assert {"rewards/correct/min", "rewards/well_formed/max"} <= set(steps[step])
