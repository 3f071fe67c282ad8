"""What an evaluation leaves behind: ``eval/<name>.json`` (protocol, metrics) and ``eval/<name>.parquet`` (samples)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from algorist.errors import CheckpointError
from algorist.evaluation.estimators import Interval


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
    samples: Sequence[dict[str, Any]],
    metrics: dict[str, Interval],
    protocol: dict[str, Any],
    model: str,
    dataset: str,
) -> Path:
    """Write both files and return the JSON's path."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(samples)), folder / f"{name}.parquet")
    path = folder / f"{name}.json"
    content = {"name": name, "model": model, "dataset": dataset, "protocol": protocol, "metrics": {k: asdict(v) for k, v in metrics.items()}}
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2), encoding="utf-8")
    partial.replace(path)
    return path


def read_artifact(folder: Path, name: str) -> Artifact:
    """Read an evaluation back.

    Raises:
        CheckpointError: It is not there.
    """
    import pyarrow.parquet

    path = folder / f"{name}.json"
    if not path.is_file():
        there = ", ".join(p.stem for p in sorted(folder.glob("*.json"))) or "none"
        raise CheckpointError(f"no evaluation '{name}' in {folder}; there: {there}")
    content = json.loads(path.read_text(encoding="utf-8"))
    metrics = {k: Interval(**v) for k, v in content["metrics"].items()}
    samples = pyarrow.parquet.read_table(folder / f"{name}.parquet").to_pylist()
    return Artifact(name, content["model"], content["dataset"], content["protocol"], metrics, samples)
