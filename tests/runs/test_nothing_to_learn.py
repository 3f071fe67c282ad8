"""A run in which nothing is answered or nothing is paid is never called healthy, by the run or by ``diagnose``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from algorist.cli.main import main
from algorist.config import load_recipe
from algorist.errors import ConfigError
from algorist.runs.pipeline import run_recipe


@pytest.fixture
def diagnose(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(run: Path, *more: str) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", ["algorist", "diagnose", str(run), *more])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, capsys.readouterr().out

    return call


def run(folder: Path, *more: str) -> Path:
    settings = ["threads=1", "sft.enabled=false", "eval.enabled=false", f"output_dir={folder}", "run_name=r"]
    run_recipe(load_recipe("smoke-cpu", [*settings, *more]).recipe)
    return folder / "r"


def test_two_steps_without_an_answer(tmp_path: Path, diagnose: Any, capsys: Any) -> None:
    folder = run(tmp_path)  # an untrained model: 32 completions, none has an answer
    assert "warning: nothing_answered: 32 of 32 completions have no answer" in capsys.readouterr().err
    assert "WARNING nothing_answered: 32 of 32" in (folder / "training.log").read_text()
    code, out = diagnose(folder)
    assert code == 1 and "no known fault" not in out
    assert "32 of 32 completions have no answer that can be read" in out and "no_answer 32" in out
    assert "sft.enabled=true  # is false" in out  # SFT, which is off here
    code, out = diagnose(folder, "--json")
    assert json.loads(out)["healthy"] is False


def test_too_little_is_not_healthy(tmp_path: Path, diagnose: Any) -> None:
    (tmp_path / "long.py").write_text("def long(completion):\n    return float(len(completion))\n")
    folder = run(tmp_path, "grpo.max_steps=1", f"rewards=[{tmp_path}/long.py:long]")
    code, out = diagnose(folder)
    assert code == 0 and "too little to judge yet" in out and "no known fault" not in out
    assert json.loads(diagnose(folder, "--json")[1])["healthy"] is None


@pytest.mark.long
def test_four_steps_that_moved_nothing_are_too_little(tmp_path: Path, diagnose: Any) -> None:
    (tmp_path / "own.py").write_text(
        "def long(completion):\n    return float(len(completion) % 3)\n"
        "def still(log_probs, old_log_probs, advantages, mask):\n    return 1e-12 * log_probs * advantages\n"
    )
    own = [
        f"rewards=[{tmp_path}/own.py:long]",
        f"grpo.loss={tmp_path}/own.py:still",
        "grpo.learning_rate=1e-12",
    ]
    code, out = diagnose(run(tmp_path, "grpo.max_steps=4", "grpo.max_completion_tokens=8", *own))
    assert "no known fault" not in out and (code == 1 or "too little to judge yet" in out)


def test_a_run_that_ended_in_sft_is_not_healthy(tmp_path: Path, diagnose: Any) -> None:
    settings = ["threads=1", "eval.enabled=false", f"output_dir={tmp_path}", "run_name=r", "sft.max_steps=8"]
    run_recipe(load_recipe("smoke-cpu", [*settings, "sft.logging_steps=1"]).recipe, stages=("sft",))
    code, out = diagnose(tmp_path / "r")
    assert code == 0 and "GRPO has not begun" in out and "no rule applies to SFT" in out
    assert json.loads(diagnose(tmp_path / "r", "--json")[1])["healthy"] is None
    lines = (tmp_path / "r/metrics.jsonl").read_text().splitlines()
    grpo = [json.dumps(json.loads(line) | {"stage": "grpo"}) for line in lines]
    (tmp_path / "r/metrics.jsonl").write_text(
        "\n".join([*lines, *grpo]) + "\n"
    )  # rollouts are stored in blocks
    _, out = diagnose(tmp_path / "r")
    assert "GRPO has not begun" not in out and "the first rollouts of GRPO are not stored yet" in out


def test_a_reward_without_a_number_is_named_once_and_alone_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def rare(rollout, problem):\n    return None if problem['index'] or '<answer>' not in rollout.text else 1.0\n\n"
        "def silent(completion):\n    len(completion)\n\n"
        "def no_score(data_source, solution_str, ground_truth, extra_info=None):\n    return {'acc': 1.0}\n"
    )
    run(tmp_path, "grpo.max_steps=3", f"rewards=[{{name: '{own}:silent'}}, {{name: correct}}]")
    log = (tmp_path / "r/training.log").read_text()
    assert log.count("reward 'silent' gave no number for any of 16 completions") == 1
    assert "reward 'correct' gave" not in log
    alone = [f"rewards=[{{name: '{own}:silent'}}, {{name: correct, weight: 0}}]", "run_name=alone"]
    with pytest.raises(
        ConfigError, match=r"for any of 16 completions, only None: 'silent' \(own\.py:4\)\. Nothing can"
    ):
        run(tmp_path, *alone)
    rows = "".join(f'{{"question": "{n} + 1?", "answer": "{n + 1}", "index": {n}}}\n' for n in range(20))
    (tmp_path / "rows.jsonl").write_text(rows)
    data = f"data.train={{name: local, path: {tmp_path}/rows.jsonl}}"
    run(
        tmp_path, "grpo.max_steps=1", f"rewards=[{{name: '{own}:rare'}}]", data, "run_name=rare"
    )  # it speaks at times
    with pytest.raises(ConfigError, match=r"a dict with acc, but without the key score in own\.py:7\. It"):
        run(tmp_path, f"rewards=[{{name: '{own}:no_score'}}]", "run_name=dict")
    assert not (tmp_path / "dict").exists()
