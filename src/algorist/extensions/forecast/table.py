"""The table of finished runs: numbers before GRPO, and the gain that it had."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from algorist.errors import DataError
from algorist.extensions.forecast.measure import Measured

TABLE = Path(__file__).with_name("runs.jsonl")
METRICS = ("pass@1", "greedy_accuracy")
"""What a gain is read from, in this order: one of several samples has the smaller interval."""


def is_sealed(name: str) -> bool:
    """Return whether a run may only test a forecast: half of them, by a hash of the name."""
    return sha256(name.encode()).digest()[0] % 2 == 1


def row_of(name: str, before: Measured, run: Path) -> dict[str, Any]:
    """Return the row of a finished run.

    Raises:
        DataError: Its result file does not say how good it was before and after GRPO.
    """
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    difference = result["difference"] or {}
    metric = next((metric for metric in METRICS if metric in difference), None)
    if metric is None or result["after"]["evaluation"] != "grpo":
        raise DataError(
            f"{run / 'result.json'} has no gain by GRPO; it needs evaluations before and after it: eval.baseline=true"
        )
    gain = difference[metric]
    return {
        "name": name,
        "sealed": is_sealed(name),
        **before.as_dict(),
        "metric": metric,
        "problems": gain["n"],
        "start": round(result["before"][metric]["value"], 4),
        "gain": [round(gain[key], 4) for key in ("value", "low", "high")],
        "processor": result["hardware"]["processor"],
        "date": result["date"],
    }


def read_table(path: Path = TABLE) -> list[dict[str, Any]]:
    """Return the rows of a table.

    Raises:
        DataError: It is not there, or a line of it is damaged.
    """
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: no table of finished runs: {error}; a row: algorist forecast RUN --add {path}"
        ) from error
