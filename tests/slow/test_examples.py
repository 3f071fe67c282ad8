"""The examples as a reader runs them: real processes, a tiny run, seconds each."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.warm import PYTHON

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = (
    *("threads=1", "device=cpu", "model.tiny={vocab_size: 400, hidden_size: 32, layers: 2}"),
    *(
        "sft.max_steps=2",
        "grpo.max_steps=2",
        "grpo.group_size=4",
        "grpo.batch_size=8",
        "grpo.max_completion_tokens=16",
    ),
    "eval.samples=2",
)
FEW = [f"data.{part}.params.count=20" for part in ("train", "sft", "eval")]


def run(folder: Path, script: str, *arguments: str) -> str:
    """Run an example in ``folder`` and return what it printed."""
    done = subprocess.run(
        [PYTHON, str(EXAMPLES / script), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run that ``own_dataset.py`` makes."""
    where = tmp_path_factory.mktemp("examples")
    (where / "printed.txt").write_text(run(where, "own_dataset.py", *TINY), encoding="utf-8")
    return where


@pytest.mark.long
def test_own_dataset_trains_on_its_problems(folder: Path) -> None:
    printed = (folder / "printed.txt").read_text(encoding="utf-8")
    assert re.findall(r"^(sft|grpo): \d\.\d{3}, 95 % interval .+ n = \d+$", printed, re.MULTILINE) == [
        "sft",
        "grpo",
    ]
    evaluated = json.loads((folder / "runs" / "larger" / "eval" / "grpo.json").read_text(encoding="utf-8"))
    assert evaluated["dataset"] == "larger"


def test_the_quickstart_is_one_script_with_its_dependencies(tmp_path: Path) -> None:
    text = (EXAMPLES / "quickstart.py").read_text(encoding="utf-8")
    lines = re.findall(r"^# ?(.*)$", text.split("# ///\n")[0].partition("# /// script\n")[2], re.MULTILINE)
    block = tomllib.loads("\n".join(lines))  # as PEP 723 reads it
    project = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert block["dependencies"] == [project["name"]]
    assert block["requires-python"] == project["requires-python"]
    assert (EXAMPLES / block["tool"]["uv"]["sources"]["algorist"]["path"] / "pyproject.toml").is_file()
    printed = run(tmp_path, "quickstart.py", *TINY, *FEW)
    assert re.findall(r"^(sft|grpo): \d+\.\d % \[", printed, re.MULTILINE) == ["sft", "grpo"]
    assert "the report: runs/quickstart/report.html" in printed


def test_read_rollouts(folder: Path) -> None:
    from algorist.store.read import query

    printed = run(folder, "read_rollouts.py", "runs/larger")
    steps = query(folder / "runs" / "larger", "SELECT DISTINCT step FROM rollouts ORDER BY step")
    assert [int(s) for s in re.findall(r"^step +(\d+)", printed, re.MULTILINE)] == [
        row["step"] for row in steps
    ]
    assert "never right in" in printed  # two steps teach nothing


def test_evaluate_model(folder: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(3)]
    (folder / "test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    for model in ("runs/larger", "runs/larger/sft/final"):
        printed = run(folder, "evaluate_model.py", model, "test.jsonl")
        assert {"greedy_accuracy", "pass@1", "pass@4"} <= set(re.findall(r"^\S+", printed, re.MULTILINE))
        assert re.search(r"greedy_accuracy +0\.\d{3} .* n = 3", printed)


def test_the_loop_without_a_trainer_trains(folder: Path) -> None:
    printed = run(folder, "grpo_loop.py", "runs/larger/sft/final", "2")
    assert re.findall(r"^step (\d): reward \d\.\d{3}, right \d+%$", printed, re.MULTILINE) == ["1", "2"]
    text = (EXAMPLES / "grpo_loop.py").read_text(encoding="utf-8")
    assert text.count("\n") <= 60 and "Trainer" not in text


def test_grade_answers(folder: Path) -> None:
    assert run(folder, "grade_answers.py").splitlines()[-1] == (
        "equal_number 2, different 1, ambiguous 1, equal_string 1"
    )
    (folder / "answers.jsonl").write_text('{"answer": "7", "gold": "7"}\n{"answer": "8", "gold": "7"}\n')
    assert "row 1: read '8', gold '7': different" in run(folder, "grade_answers.py", "answers.jsonl")


def test_own_reward_in_a_run(folder: Path) -> None:
    from algorist.cli.verbs import VERBS
    from algorist.prompts import get_format
    from algorist.store.read import query

    usage = ast.get_docstring(ast.parse((EXAMPLES / "own_reward.py").read_text(encoding="utf-8"))) or ""
    verb, recipe, setting = re.findall(r"algorist (\w+) (\S+) '(.+)'", usage)[0]
    assert verb in VERBS
    command = [PYTHON, "-m", "algorist.cli.main", verb, recipe, setting, "run_name=reward", *TINY, *FEW]
    (folder / "examples").symlink_to(EXAMPLES)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = query(folder / "runs" / "reward", "SELECT completion, rewards['shows_work'] AS paid FROM rollouts")
    assert len(rows) == 16
    reasoning = [get_format("reasoning_answer").parse(row["completion"]).reasoning or "" for row in rows]
    assert [row["paid"] for row in rows] == [0.25 if "=" in text else 0.0 for text in reasoning]


def test_examples_are_few_short_and_public() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) <= 11  # ten parts, and quickstart.py, the whole as one script for uv
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        assert text.count("\n") <= 80, script
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("algorist"):
                assert not any(name.name.startswith("_") for name in node.names), script


def test_own_algorithm_in_a_run_and_in_a_loop(folder: Path) -> None:
    from algorist.store.read import metrics, query

    command = [PYTHON, "-m", "algorist.cli.main", "run", "quickstart", "run_name=own", *TINY, *FEW]
    own = EXAMPLES / "own_algorithm.py"
    command += [f"grpo.advantage={own}:median_centered", f"grpo.loss={own}:reinforce"]
    command.append(
        "rewards=[{name: correct}, {name: xmlcount}]"
    )  # a policy of two steps writes tags by chance
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = query(folder / "runs/own", 'SELECT step, "group", reward, advantage FROM rollouts ORDER BY ALL')
    groups: dict[tuple[int, int], list[dict[str, float]]] = {}
    for row in rows:
        groups.setdefault((row["step"], row["group"]), []).append(row)
    for members in groups.values():
        median = sorted(row["reward"] for row in members)[(len(members) - 1) // 2]
        assert all(row["advantage"] == pytest.approx(row["reward"] - median, abs=1e-6) for row in members)
    lines = [line for line in metrics(folder / "runs/own", "grpo") if "loss" in line]
    assert lines and all("loss/praised_log_prob" in line for line in lines)

    printed = run(folder, "own_algorithm.py", "runs/own/sft/final", "2")
    assert re.findall(r"^step (\d): reward -?\d\.\d{3}$", printed, re.MULTILINE) == ["1", "2"]


@pytest.mark.long
def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell runs in a real kernel; the gain, a completion and the report come out."""
    client, form = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    small = [t for t in TINY if " " not in t] + [
        f"model.tiny.{key}" for key in ("hidden_size=32", "layers=2")
    ]
    monkeypatch.setenv("ALGORIST_SETTINGS", " ".join([*small, *FEW]))
    notebook = form.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    done = client.NotebookClient(
        notebook, timeout=360, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in done.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout")
    assert re.search(r"gain: [+-]\d+\.\d points \[", printed) and re.search(
        r"greedy_accuracy +\d+\.\d % \[.*→", printed
    )
    pages = [output["data"]["text/html"] for output in outputs if "data" in output]
    assert len(pages) == 1 and pages[0].startswith("<iframe srcdoc=") and "algorist report" in pages[0]


@pytest.mark.long
def test_notebook_of_your_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a CSV to an exported model: every cell runs in a real kernel."""
    client, form = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("ALGORIST_SETTINGS", "threads=1 device=cpu sft.max_steps=2 grpo.max_steps=2")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    notebook = form.read(EXAMPLES / "your_own_data.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    place = {"metadata": {"path": str(tmp_path)}}
    done = client.NotebookClient(notebook, timeout=360, resources=place).execute()
    printed = "".join(output.get("text", "") for cell in done.cells for output in cell.get("outputs", []))
    assert "Written by `algorist new`" in printed and "my-model: README.md" in printed
    assert "grpo 2/2 · loss" in printed and "\x1b[2K" not in printed
    assert (tmp_path / "my-model" / "config.json").is_file() and (tmp_path / "mine_reward.py").is_file()


def test_a_stock_trl_script_learns_from_the_grader(tmp_path: Path) -> None:
    script = str(EXAMPLES.parent / "packages" / "grader" / "examples" / "trl_grader.py")
    shares = [
        float(n) for n in re.findall(r"^step \d+: (\d\.\d{3}) right$", run(tmp_path, script), re.MULTILINE)
    ]
    assert len(shares) == 6 and shares[-1] > shares[0] + 0.2
