"""``result.json`` of a run, and the table of docs/results.md that is made from such files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from algorist.cli.diagnose_command import Diagnosis
from algorist.errors import DataError
from algorist.evaluation.artifact import read_artifact
from algorist.evaluation.compare import paired_metrics
from algorist.report.results import gained, results_table
from algorist.store.times import Took

DOCS = Path(__file__).resolve().parents[2] / "docs"
SETTINGS = (
    "threads=1", "sft.max_steps=1", "grpo.max_steps=1", "grpo.batch_size=8", "data.train.params.count=32",
    "data.eval.params.count=8", "eval.max_completion_tokens=8",
)  # fmt: skip


def test_a_run_leaves_its_result(tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_" + "Ab3dEf6hIj9lMn2pQr5tUv8xYz1BcD4fGh"
    hidden = tmp_path / "private-place"
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("algorist.store.run_folder.processor_name", lambda: f"AMD EPYC {token}")
    done = call("run", "smoke-cpu", *SETTINGS, f"output_dir={hidden}", "run_name=r", "--json")
    assert done.returncode == 0, done.stderr
    text = (hidden / "r" / "result.json").read_text()
    assert str(tmp_path) not in text and str(Path.home()) not in text and token not in text
    result = json.loads(text)
    assert (
        result["command"].startswith("algorist run smoke-cpu threads=1")
        and "output_dir=" in result["command"]
    )
    assert result["hardware"]["processor"] == "AMD EPYC [redacted]" and result["hardware"]["threads"] == 1
    first, last = (read_artifact(hidden / "r" / "eval", name) for name in ("sft", "grpo"))
    assert result["before"]["evaluation"] == "sft" and result["after"]["evaluation"] == "grpo"
    strict = paired_metrics(first.samples, last.samples)["greedy_accuracy"]
    assert result["difference"]["greedy_accuracy"]["low"] == strict.low and result["n"] == 8
    assert result["after"]["lenient_accuracy"]["value"] == last.metrics["lenient_accuracy"].value
    assert result["processor_minutes"] > 0 and 0.1 < result["peak_memory_gib"] < 100
    assert all(result["versions"][name] for name in ("python", "torch", "transformers", "algorist"))
    assert (result["model"], result["data"]["eval"], result["seed"]) == ("tiny", "arithmetic", 42)
    assert re.fullmatch("[0-9a-f]{16}", result["recipe_hash"])
    table = call("recipes", "results", str(hidden / "r" / "eval"))  # other JSON files are there
    assert table.returncode == 2 and "is no result of a run" in table.stderr


def test_the_table_in_the_docs_is_that_of_the_files() -> None:
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    assert results_table(DOCS / "results") in page, "write it again: algorist recipes results"


def test_diagnose_says_what_a_run_without_a_fault_gained(tmp_path: Path) -> None:
    assert gained(tmp_path) == ""
    shutil.copy(DOCS / "results" / "quickstart-grpo-amd-epyc.json", tmp_path / "result.json")
    gain = "Held-out accuracy 36.8 → 99.2 %: +62.4 [+55.7, +68.1] points, a gain beyond chance."
    assert gained(tmp_path) == gain
    result = json.loads((tmp_path / "result.json").read_text())
    result["difference"]["greedy_accuracy"]["low"] = -0.01
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert gained(tmp_path).endswith("[-1.0, +68.1] points, which may be chance.")
    (tmp_path / "result.json").write_text('{"difference": {"greedy_accuracy": "x"}}')
    assert gained(tmp_path) == ""
    seen = {"grpo_steps": 40, "rollouts": 5120, "metric_lines": 304}
    head, rules, last = Diagnosis(
        run="runs/r", healthy=True, looked_at=seen, missing_tags={}, moved=[], findings=[], not_explained="", why_too_little="",
        gained=gain, cut_off=0.0, shown=[],
    ).view(80)  # fmt: skip
    assert (
        getattr(head, "text", "") == "runs/r: no known fault"
        and "algorist recipes rules" in str(rules)
        and last == gain
    )


def test_a_folder_without_results_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no result files in .*RUN/result\.json"):
        results_table(tmp_path)
    (tmp_path / "x.json").write_text('{"recipe": "| a", "seed": 1, "hardware": {"devices": []}}')
    with pytest.raises(DataError, match=r"x\.json is no result of a run \(KeyError"):
        results_table(tmp_path)
    one = next((DOCS / "results").glob("*.json"))
    (tmp_path / "result.json").write_bytes(one.read_bytes())  # a run's folder has other JSON files
    assert results_table(tmp_path) == results_table(one) != ""


def test_processor_minutes_of_several_processes_are_not_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    took = Took(resumed=False)
    assert took.until_now()["processor_minutes"] is not None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert took.until_now()["processor_minutes"] is None
