"""Artifact of an evaluation: ``eval/<name>.json`` (protocol, metrics) and ``eval/<name>.parquet`` (samples).

A row of the samples is one completion; its columns are those of ``store.write.SCHEMA``, more are kept as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from algorist.errors import DAMAGED, CheckpointError, ConfigError, DataError
from algorist.evaluation.console import breakdown
from algorist.evaluation.estimators import Interval
from algorist.store.atomic import replace_file, replace_text
from algorist.store.write import SCHEMA, valid_text

_NEEDED = ("problem_id", "greedy", "correct")


@dataclass
class Artifact:
    """One evaluation."""

    name: str
    model: str
    dataset: str
    protocol: dict[str, Any]
    metrics: dict[str, Interval]
    samples: list[dict[str, Any]]


def write_artifact(
    folder: Path,
    name: str,
    *,
    samples: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, Interval],
    protocol: Mapping[str, Any],
    model: str,
    dataset: str,
) -> Path:
    """Write both files, the JSON last, and return its path; of two of which one is of a former evaluation none is read.

    Raises:
        ConfigError: ``name`` is not a plain file name.
        DataError: A sample lacks ``problem_id``, ``greedy`` or ``correct``, or does not fit the schema.
        CheckpointError: The disk refuses.
    """
    if not name or name.startswith(".") or "/" in name or "\\" in name or "\0" in name:
        raise ConfigError(
            f"'{name}' cannot name an evaluation; expected a plain file name such as 'gsm8k-test'"
        )
    folder.mkdir(parents=True, exist_ok=True)
    table = _table(samples, dataset)
    (folder / f"{name}.json").unlink(missing_ok=True)
    replace_file(
        folder / f"{name}.parquet",
        lambda partial: pyarrow.parquet.write_table(table, partial, compression="zstd"),
    )
    content = {
        "name": name,
        "model": model,
        "dataset": dataset,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "n": len({row["problem_id"] for row in samples}),
        "protocol": dict(protocol),
        "metrics": plain_numbers(metrics),
    }
    if any(row.get("subject") for row in samples):
        by_subject = breakdown(samples, "subject", ks=())
        content["subjects"] = {subject: plain_numbers(numbers) for subject, numbers in by_subject.items()}
    path = folder / f"{name}.json"
    replace_text(path, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")
    return path


def read_artifact(folder: Path, name: str) -> Artifact:
    """Read an evaluation back.

    Raises:
        CheckpointError: It is not there, or damaged.
    """
    path = folder / f"{name}.json"
    if not path.is_file():
        names = ", ".join(artifact_names(folder)) or "none"
        raise CheckpointError(f"no evaluation '{name}' in {folder}; there: {names}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        metrics = {key: _from_json(value) for key, value in content["metrics"].items()}
        samples = pyarrow.parquet.ParquetFile(folder / f"{name}.parquet").read().to_pylist()
        if samples and (lacking := set(SCHEMA.names) - samples[0].keys()):
            raise KeyError(f"no column {', '.join(sorted(lacking))}")
        for row in samples:
            if not (type(row["correct"]) is bool and type(row["greedy"]) is bool):
                raise TypeError("a sample's correct or greedy is neither yes nor no")
            row["rewards"] = dict(row["rewards"] or ())
        protocol = dict(content["protocol"])
        return Artifact(name, content["model"], content["dataset"], protocol, metrics, samples)
    except (*DAMAGED, pyarrow.ArrowException) as error:
        raise CheckpointError(
            f"evaluation '{name}' in {folder} is damaged ({type(error).__name__}: {error}); evaluate again"
        ) from None


def artifact_names(folder: Path) -> list[str]:
    """Return the names of the evaluations in ``folder``, oldest first."""
    files = [p for p in folder.glob("*.json") if p.with_suffix(".parquet").is_file()]
    return [p.stem for p in sorted(files, key=lambda p: (p.stat().st_mtime_ns, p.stem))]


def _table(samples: Sequence[Mapping[str, Any]], dataset: str) -> pyarrow.Table:
    known = set(SCHEMA.names)
    rows = []
    for index, row in enumerate(samples):
        missing = [name for name in _NEEDED if row.get(name) is None]
        if missing:
            raise DataError(
                f"sample {index} has no {', '.join(missing)}; every sample needs {', '.join(_NEEDED)}"
            )
        clean = valid_text(row) | {"dataset": row.get("dataset") or dataset}
        rewards = row.get("rewards") or {}
        clean["rewards"] = list(rewards.items()) if isinstance(rewards, Mapping) else rewards
        rows.append(clean)
    try:
        table = pyarrow.Table.from_pylist(rows, schema=SCHEMA)
        for name in sorted({name for row in rows for name in row} - known):
            table = table.append_column(name, pyarrow.array([row.get(name) for row in rows]))
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"a sample does not fit the schema: {error}") from error
    return table


def plain_numbers(metrics: Mapping[str, Interval]) -> dict[str, dict[str, float | int | None]]:
    """Return intervals as plain numbers for JSON, None for NaN."""
    return {
        name: {key: value if math.isfinite(value) else None for key, value in asdict(interval).items()}
        for name, interval in metrics.items()
    }


def _from_json(stored: Mapping[str, Any]) -> Interval:
    value, low, high = (math.nan if stored[k] is None else float(stored[k]) for k in ("value", "low", "high"))
    return Interval(value, low, high, int(stored.get("n", 0)))
