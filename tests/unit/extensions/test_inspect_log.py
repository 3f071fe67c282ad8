"""``--export inspect``: the file as inspect_ai's own reader sees it, where that package is installed, and its parts."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

import algorist.config.schema  # noqa: F401  (finds the extensions)
from algorist.evaluation.artifact import Artifact
from algorist.evaluation.doors import EXPORTERS
from algorist.evaluation.estimators import Interval

ROWS = [
    {
        "problem_id": f"p/{n}",
        "question": f"{n} + 1?",
        "prompt": f"Q: {n} + 1?",
        "gold": str(n + 1),
        "completion": f"It is {n + 1 + n % 2}.",
        "extracted": str(n + 1 + n % 2),
        "correct": n % 2 == 0,
        "lenient": n % 2 == 0,
        "reason": "equal_string" if n % 2 == 0 else "different",
        "greedy": sample == 0,
        "sample": sample,
        "truncated": False,
    }
    for n in range(4)
    for sample in range(2)
]
READ = """
import sys
from inspect_ai.log import read_eval_log
log = read_eval_log(sys.argv[1])
right = sum(s.scores["correct"].value == "C" for s in log.samples)
print(log.status, log.eval.task, len(log.samples), right, log.samples[0].output.completion, log.results.scores[0].metrics["greedy_accuracy"].value)
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    artifact = Artifact(
        "sft", "tiny", "sums", {"name": "greedy"}, {"greedy_accuracy": Interval(0.5, 0.15, 0.85, 4)}, ROWS
    )
    return EXPORTERS.get("inspect")(artifact, tmp_path / "logs", "sums")


def test_parts_of_the_log(log: Path) -> None:
    with zipfile.ZipFile(log) as archive:
        header = json.loads(archive.read("header.json"))
        summaries = json.loads(archive.read("summaries.json"))
        sample = json.loads(archive.read("samples/p-1_epoch_2.json"))
    assert header["eval"]["dataset"] == {"name": "sums", "samples": 4} and header["status"] == "success"
    assert header["results"]["scores"][0]["metrics"]["greedy_accuracy"]["value"] == 0.5
    assert len(summaries) == 8
    assert sample["scores"]["correct"] == {"value": "I", "answer": "3", "explanation": "different"}


def test_ids_that_differ_in_signs_are_samples_of_their_own(tmp_path: Path) -> None:
    ids = ("2023/I-1", "2023-I-1", "2023 I 1", "α")
    rows = [ROWS[0] | {"problem_id": name} for name in ids]
    artifact = Artifact("sft", "tiny", "sums", {}, {"greedy_accuracy": Interval(1.0, 0.5, 1.0, 4)}, rows)
    with zipfile.ZipFile(EXPORTERS.get("inspect")(artifact, tmp_path / "logs", "sums")) as archive:
        samples = [json.loads(archive.read(n)) for n in archive.namelist() if n.startswith("samples/")]
    assert sorted(sample["id"] for sample in samples) == sorted(ids)


@pytest.mark.skipif(
    "INSPECT_PYTHON" not in os.environ, reason="INSPECT_PYTHON names no Python that has inspect_ai"
)
def test_inspect_reads_it(log: Path) -> None:
    command = [os.environ["INSPECT_PYTHON"], "-c", READ, str(log)]
    seen = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[-2]
    assert seen == "success sums 8 4 It is 1. 0.5"
