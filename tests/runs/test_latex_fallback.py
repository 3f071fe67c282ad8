"""Without math-verify the matcher ``latex_verify`` decides by algorist's own rules: one warning, honest reasons, no run broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from algorist.extensions.published_rewards.systems import formula_in
from algorist.store.read import query
from algorist_grader import grade

RIGHT = [
    ("0.5", "\\frac{1}{2}"), ("$x^2-1$", "(x-1)(x+1)"), ("\\boxed{(1,2)}", "(1, 2)"), ("7", "7"),
    ("\\sqrt{5+2\\sqrt{6}}", "\\sqrt{2}+\\sqrt{3}"),
]  # fmt: skip
WRONG = [("0.33", "\\frac{1}{3}"), ("$x^2+1$", "(x-1)(x+1)"), ("(2,1)", "(1, 2)"), ("8", "7")]
GRADE = """
import json, sys
from algorist_grader import grade_many
from algorist_grader.matchers import deciding_matcher
pairs = json.loads(sys.argv[1])
told = grade_many(pairs, matcher="latex_verify", workers=int(sys.argv[2]), timeout_s=30.0)
print(json.dumps({"told": [(g.correct, g.reason) for g in told], "by": deciding_matcher("latex_verify")}))
"""


def without(package: str, folder: Path) -> dict[str, str]:
    """Return an environment in which a package cannot be imported, neither here nor in any process started from here."""
    folder.mkdir()
    (folder / f"{package}.py").write_text(f"raise ImportError(\"No module named '{package}'\")\n")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def graded(environment: dict[str, str], threads: int) -> tuple[dict[str, object], str]:
    done = subprocess.run(
        [sys.executable, "-c", GRADE, json.dumps([*RIGHT, *WRONG]), str(threads)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("package", ["math_verify", "latex2sympy2_extended"])
def test_a_missing_package_is_said_once_and_verdicts_are_those_of_symbolic(
    package: str, tmp_path: Path
) -> None:
    found, errors = graded(without(package, tmp_path / "blocked"), 4)
    verdicts = [tuple(pair) for pair in found["told"]]  # type: ignore[attr-defined]
    assert [correct for correct, _ in verdicts] == [True] * len(RIGHT) + [False] * len(WRONG)
    assert verdicts == [
        (g.correct, g.reason) for g in (grade(a, b, matcher="symbolic") for a, b in [*RIGHT, *WRONG])
    ]
    assert found["by"] == "symbolic" and verdicts[0][1] == "equal_number"  # math-verify has no such reason
    (line,) = errors.splitlines()
    assert line.startswith(f"{package} cannot be imported") and "pip install 'math-verify[" in line
    assert "'latex_verify' decides as 'symbolic'" in line


@pytest.mark.slow
def test_with_the_package_nothing_is_said() -> None:
    pytest.importorskip("math_verify")
    found, errors = graded(dict(os.environ), 1)
    assert found["by"] == "latex_verify" and errors == ""
    reasons = {reason for _, reason in found["told"]}  # type: ignore[attr-defined]
    assert "equal_symbolic" in reasons and not reasons & {"equal_string", "equal_number"}


@pytest.mark.long
@pytest.mark.slow
def test_a_run_of_r1_zero_numina_finishes_without_it(tmp_path: Path, shared_data: Path) -> None:
    """The warning is on the console and in the log file once; every stored verdict is the one of ``symbolic``."""
    with (shared_data / "math500/test.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(next(file)) for _ in range(10)]
    for name, part in (("train", rows[:8]), ("test", rows[8:])):
        lines = [
            json.dumps({"problem": r["problem"], "solution": r["solution"], "messages": []}) for r in part
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable, "-m", "algorist.cli.main", "run", "r1-zero-numina", "model.name=tiny",
            "model.tiny={hidden_size: 32, layers: 1, vocab_size: 600, max_position_embeddings: 2048}", "device=cpu", "threads=1",
            f"data.train.path={tmp_path}/train.jsonl", f"data.eval.path={tmp_path}/test.jsonl", f"output_dir={tmp_path}",
            "run_name=r", "grpo.max_steps=2", "grpo.max_completion_tokens=16", "grpo.group_size=4", "grpo.logging_steps=1",
            "grpo.gradient_accumulation_steps=1", "eval.max_completion_tokens=8",
        ],
        env=without("math_verify", tmp_path / "blocked"), cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    console = " ".join((done.stdout + done.stderr).split())
    assert console.count("math_verify cannot be imported") == 1 and "warning: math_verify" in console
    assert (tmp_path / "r/training.log").read_text().count("math_verify cannot be imported") == 1
    stored = query(
        tmp_path / "r", "SELECT completion, extracted, gold, correct, reason, rewards FROM rollouts"
    )
    assert len(stored) == 8 and (tmp_path / "r/grpo/final/model.safetensors").is_file()
    artifact = json.loads((tmp_path / "r/eval/grpo.json").read_text(encoding="utf-8"))
    assert artifact["protocol"]["matcher"] == "symbolic"
    for row in stored:
        told = grade(row["extracted"], row["gold"], matcher="symbolic")
        assert (row["correct"], row["reason"]) == (told.correct, told.reason)
        written = grade(formula_in(row["completion"]), row["gold"], matcher="symbolic")
        assert row["rewards"]["accuracy"] == float(written.correct)
