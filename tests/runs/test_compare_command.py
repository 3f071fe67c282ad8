"""``algorist compare`` on evaluations and on runs: table, tests, flipped problems, JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from algorist.cli.main import main
from tests.unit.evaluation.test_compare import make_samples, write


def make_run(folder: Path, right: dict[str, list[int]]) -> Path:
    for name, values in right.items():
        rows = make_samples(0.0, problems=len(values), samples=0)
        write(
            folder / "eval", name, [row | {"correct": bool(v)} for row, v in zip(rows, values, strict=True)]
        )
    return folder


def test_two_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def algorist(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["algorist", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return capsys.readouterr().out

    first = make_run(tmp_path / "a", {"sft": [0] * 12, "grpo": [1] * 3 + [0] * 9})
    second = make_run(tmp_path / "b", {"sft": [0] * 12, "grpo": [0] + [1] * 11})
    told = algorist("compare", str(first), str(second))
    assert "12 problems · greedy answers: 9 turned right, 1 turned wrong, McNemar's exact p = 0.021" in told
    assert "turned wrong:\n  p0  " in told and told.count("\n  p") == 10
    assert "by the last number" not in told  # rows of before know no lenient verdict
    rows = make_samples(0.0, problems=10, samples=0)
    for name, strict, lenient in (("sft", 0, 4), ("grpo", 6, 7)):
        write(
            tmp_path / "c" / "eval",
            name,
            [row | {"correct": i < strict, "lenient": i < lenient} for i, row in enumerate(rows)],
        )
    third = str(tmp_path / "c" / "eval" / "sft.json"), str(tmp_path / "c")
    told = algorist("compare", *third)
    assert "warning: 10 problems: one of them is 10.0 points" in told
    assert "by the last number of each completion, whatever its format: +30.0 points [" in told
    found = json.loads(algorist("compare", *third, "--json"))
    assert found["differences"]["lenient_accuracy"]["value"] == pytest.approx(0.3)
    assert "by the last number" not in algorist("compare", third[0], third[0])  # nothing changed
    found = json.loads(algorist("compare", str(first / "eval" / "sft.json"), str(first), "--json"))
    assert (found["first"], found["second"], found["gained"]) == ("sft", "grpo", ["p0", "p1", "p2"])
    assert found["differences"]["greedy_accuracy"]["value"] == pytest.approx(0.25)
    assert found["p_value"] == pytest.approx(0.25)
