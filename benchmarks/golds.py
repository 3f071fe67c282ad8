"""The gold answers of the real datasets under ../shared/data, as text, for the grading benchmark and its tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from algorist_grader import hash_answer, last_boxed

_ABOVE = Path(__file__).resolve().parents
SHARED = next((p / "shared/data" for p in _ABOVE if (p / "shared/data").is_dir()), _ABOVE[2] / "shared/data")
"""The nearest ``shared/data`` above this file: beside the checkout, or beside the folder of worktrees."""


def rows(name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file under the shared data folder."""
    path = SHARED / name
    if path.suffix == ".parquet":
        yield from pq.read_table(path).to_pylist()
    else:
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _truth(row: dict[str, Any]) -> dict[str, Any]:
    return row["reward_model"]["ground_truth"]  # type: ignore[no-any-return]


_READ: dict[str, tuple[str, Callable[[dict[str, Any]], str | None]]] = {
    "gsm8k train": ("gsm8k/train.jsonl", lambda r: hash_answer(r["answer"])),
    "gsm8k test": ("gsm8k/test.jsonl", lambda r: hash_answer(r["answer"])),
    "math train": ("math/train.parquet", lambda r: last_boxed(_truth(r)["solution"])),
    "math test": ("math/test.parquet", lambda r: last_boxed(r["solution"])),
    "math500": ("math500/test.jsonl", lambda r: r["answer"]),
    "olympiadbench": ("olympiadbench/test.jsonl", lambda r: r["final_answer"][0]),
    "minerva": ("minerva_math/test.jsonl", lambda r: last_boxed(r["solution"])),
    "college math": ("college_math/test.jsonl", lambda r: r["answer"]),
    "gaokao": ("gaokao2023en/test.jsonl", lambda r: r["answer"]),
    "amc23": ("amc23/test.jsonl", lambda r: _number(r["answer"])),
    "aime24": ("aime24/test.jsonl", lambda r: str(r["answer"])),
    "aime25": ("aime25/test.parquet", lambda r: str(_truth(r)["target"])),
    "svamp": ("svamp/test.jsonl", lambda r: _number(r["Answer"])),
    "dapo": ("dapo_math_14k/train.parquet", lambda r: r["reward_model"]["ground_truth"]),
}


def datasets() -> list[str]:
    """Return the names."""
    return list(_READ)


def golds(name: str) -> list[str]:
    """Return the gold answers of a dataset, in order; rows without one are left out."""
    path, read = _READ[name]
    found = (read(row) for row in rows(path))
    return [gold for gold in found if gold]
