"""Writers of a run: rollouts as Parquet parts, metrics as JSON lines. Atomic parts, bounded memory."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

SCHEMA = pyarrow.schema(
    [
        ("stage", pyarrow.string()),
        ("step", pyarrow.int64()),
        ("problem_id", pyarrow.string()),
        ("group", pyarrow.int64()),
        ("prompt", pyarrow.string()),
        ("completion", pyarrow.string()),
        ("prompt_tokens", pyarrow.int32()),
        ("completion_tokens", pyarrow.int32()),
        ("sampler_log_prob_sum", pyarrow.float64()),
        ("rewards", pyarrow.map_(pyarrow.string(), pyarrow.float64())),
        ("reward", pyarrow.float64()),
        ("advantage", pyarrow.float64()),
        ("correct", pyarrow.bool_()),
        ("reason", pyarrow.string()),
        ("extracted", pyarrow.string()),
        ("gold", pyarrow.string()),
        ("truncated", pyarrow.bool_()),
        ("seconds", pyarrow.float64()),
    ]
)


class RolloutWriter:
    """Appends rollouts to ``part-NNNNNN.parquet`` files; a part appears whole or not at all.

    Args:
        folder: The run's ``rollouts`` folder.
        rows_per_part: Rows that are buffered before a part is written.
    """

    def __init__(self, folder: Path, *, rows_per_part: int = 4096) -> None:
        self.folder, self.rows_per_part = Path(folder), rows_per_part
        self.folder.mkdir(parents=True, exist_ok=True)
        self._rows: list[dict[str, Any]] = []

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Buffer rows; full parts are written."""
        self._rows.extend(rows)
        if len(self._rows) >= self.rows_per_part:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered as one part."""
        if not self._rows:
            return
        rows = [
            {name: (list(row["rewards"].items()) if name == "rewards" and row.get("rewards") else row.get(name)) for name in SCHEMA.names}
            for row in self._rows
        ]
        number = 1 + max((int(p.stem[5:]) for p in self.folder.glob("part-*.parquet")), default=-1)
        _write_table(pyarrow.Table.from_pylist(rows, schema=SCHEMA), self.folder / f"part-{number:06d}.parquet")
        self._rows.clear()

    def truncate_after(self, step: int) -> None:
        """Drop rollouts of steps after ``step``: what a resumed run will make again."""
        self._rows = [r for r in self._rows if r["step"] < step]
        for path in sorted(self.folder.glob("part-*.parquet")):
            table = pyarrow.parquet.read_table(path)
            kept = table.filter(pyarrow.compute.less(table["step"], step))
            if kept.num_rows == 0:
                path.unlink()
            elif kept.num_rows < table.num_rows:
                _write_table(kept, path)

    def close(self) -> None:
        """Write the rest."""
        self.flush()

    def __enter__(self) -> RolloutWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MetricsWriter:
    """Appends one JSON object per line: stage, step, time and the numbers; NaN and infinities become null."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, stage: str, step: int, values: dict[str, float]) -> None:
        """Append one line and hand it to the system."""
        clean = {k: (float(v) if math.isfinite(v) else None) for k, v in values.items()}
        self._file.write(json.dumps({"stage": stage, "step": step, "time": round(time.time(), 3), **clean}) + "\n")
        self._file.flush()

    def truncate_after(self, stage: str, step: int) -> None:
        """Drop the lines of ``stage`` after ``step``."""
        lines = [row for row in read_metrics(self.path) if row["stage"] != stage or row["step"] <= step]
        self._file.close()
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
        partial.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Write through to the disk."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; a torn last line is left out."""
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows


def _write_table(table: pyarrow.Table, path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    pyarrow.parquet.write_table(table, partial, compression="zstd")
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)
