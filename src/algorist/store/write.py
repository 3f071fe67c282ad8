"""Writers of a run: rollouts as Parquet parts, metrics as JSON lines. Atomic, bounded memory, exact on resume.

Layout of the rollouts: the rows in the order they were written, cut into ``part-NNNNNN.parquet`` by count (and by size
for very long completions). Where the cuts fall depends on the rows alone, so a run that was killed and resumed has the
same parts as one that was not. ``flush`` writes the unfinished last part as it is; it is written again when it grows.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from algorist.errors import DAMAGED, CheckpointError, DataError
from algorist.store.atomic import PARTIAL, replace_file, replace_text
from algorist.system import sync_folder
from algorist.types import ENVIRONMENT, Group, Rollout

# ---- the one schema of stored completions: what a group of rollouts becomes in Parquet, for training and evaluation alike

VERSION = "2"


def _columns(text: str, **others: pyarrow.DataType) -> list[tuple[str, pyarrow.DataType]]:
    """Return ``name:type …`` as columns of Arrow's types, or of ``others``."""
    pairs = (part.split(":") for part in text.split())
    return [(name, others.get(kind) or pyarrow.type_for_alias(kind)) for name, kind in pairs]


TURN = pyarrow.struct(_columns("source:string request:string reply:string error:string seconds:double"))
SCHEMA = pyarrow.schema(
    _columns(
        """
        stage:string step:int64 problem_id:string group:int64 sample:int32 greedy:bool dataset:string
        subject:string level:string question:string prompt:string completion:string prompt_tokens:int32
        completion_tokens:int32 sampled_tokens:int32 turns:turns truncated:bool well_formed:bool
        has_reasoning:bool reasoning_characters:int32 extracted:string gold:string correct:bool
        reason:string checker:string rewards:rewards reward:double advantage:double
        sampler_log_prob_sum:double seconds:double
        """,
        turns=pyarrow.list_(TURN),
        rewards=pyarrow.map_(pyarrow.string(), pyarrow.float64()),
    ),
    metadata={"algorist.rollouts": VERSION},
)


def rows_of(
    group: Group, *, index: int = 0, advantages: Sequence[float] | None = None
) -> list[dict[str, Any]]:
    """Return one row of ``SCHEMA`` for each rollout of a group; the caller adds ``stage`` and ``step``.

    Args:
        group: A group of graded rollouts.
        index: Place of the group in its batch.
        advantages: The advantage that each rollout was trained with; NaN for one that was sampled only, stored as null.
    """
    problem = group.problem
    rows = []
    for sample, rollout in enumerate(group.rollouts):
        known = rollout.log_probs is not None and all(v is not None for v in rollout.log_probs)
        grade = rollout.grade
        rows.append(
            {
                "problem_id": problem.id,
                "group": index,
                "sample": sample,
                "dataset": problem.extra.get("dataset"),
                "subject": problem.subject,
                "level": problem.level,
                "question": problem.question,
                "prompt": group.prompt,
                "completion": rollout.text,
                "prompt_tokens": len(group.prompt_ids),
                "completion_tokens": len(rollout.completion_ids),
                "sampled_tokens": sum(rollout.sampled_mask),
                "turns": [asdict(turn) for turn in rollout.turns] or None,
                "truncated": rollout.truncated,
                "well_formed": rollout.parsed.well_formed,
                "has_reasoning": rollout.parsed.reasoning is not None,
                "reasoning_characters": len(rollout.parsed.reasoning or ""),
                "extracted": grade.extracted if grade else None,
                "gold": problem.answer,
                "correct": grade.correct if grade else None,
                "reason": grade.reason if grade else None,
                "checker": problem.checker or None,
                "rewards": rollout.rewards,
                "reward": rollout.reward,
                "advantage": None if advantages is None or isnan(advantages[sample]) else advantages[sample],
                "sampler_log_prob_sum": _sampled_sum(rollout) if known else None,
                "seconds": group.seconds,
            }
        )
    return rows


def conversation(row: Mapping[str, Any]) -> str:
    """Return a stored completion with the exchanges with an environment before it."""
    said = [
        f"{turn['request']}\n[{ENVIRONMENT}] {turn['reply']}\n"
        for turn in row.get("turns") or ()
        if turn["source"] == ENVIRONMENT
    ]
    return "".join([*said, row["completion"] or ""])


def _sampled_sum(rollout: Rollout) -> float:
    pairs = zip(rollout.log_probs or (), rollout.sampled_mask, strict=True)
    return float(sum(value for value, own in pairs if own))


# ---- what writes them

_PART_CHARACTERS = 32_000_000


class RolloutWriter:
    """Appends rollouts to ``part-NNNNNN.parquet`` files; a part appears whole or not at all.

    A row is a dictionary with names of ``SCHEMA``; missing ones are null, unknown ones are refused. ``step`` is the
    number of optimizer steps that were done when the completion was sampled. Call ``flush`` *before* a checkpoint
    becomes valid: then no rollout before a valid checkpoint can be lost.

    Args:
        folder: The run's ``rollouts`` folder.
        stage: Fills ``stage`` where a row has none; ``truncate_after`` touches this stage only.
        rows_per_part: Rows in a full part, also the most that are held in memory.
    """

    def __init__(self, folder: Path, *, stage: str = "grpo", rows_per_part: int = 4096) -> None:
        self.folder, self.stage, self.rows_per_part = Path(folder), stage, rows_per_part
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left_over in self.folder.glob(f"part-*{PARTIAL}"):
                left_over.unlink()
        except OSError as error:
            raise CheckpointError(f"cannot use the rollout folder {self.folder}: {error}") from None
        self._rows: list[dict[str, Any]] = []
        self._number = 0
        self._dirty = False
        self._load_tail()

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take rows; full parts are written.

        Raises:
            DataError: A row has an unknown column or a value of the wrong type; none of ``rows`` was taken.
            CheckpointError: The disk is full or not writable; all rows were taken, and the next ``write`` or
                ``flush`` tries again.
        """
        for row in rows:
            if not row.keys() <= _NAMES:
                raise DataError(
                    f"rollout with unknown columns {sorted(row.keys() - _NAMES)}; known: {', '.join(SCHEMA.names)}"
                )
        clean = [_clean(row, self.stage) for row in rows]
        self._rows.extend(clean)
        self._dirty = self._dirty or bool(clean)
        self._write_full_parts()

    def flush(self) -> None:
        """Write the rows in memory through to the disk."""
        self._write_full_parts()
        if self._dirty:
            self._write_part(self._rows)
            self._dirty = False

    def truncate_after(self, step: int) -> None:
        """Drop this stage's rollouts that were sampled when ``step`` or more optimizer steps were done.

        A run that continues from ``checkpoint-<step>`` samples exactly these again. Safe to repeat after a crash.
        """
        self.flush()
        for path in reversed(part_paths(self.folder)):
            keys = read_part(path, columns=["stage", "step"])
            keep = pyarrow.compute.or_(
                pyarrow.compute.less(keys["step"], step),
                pyarrow.compute.not_equal(pyarrow.compute.fill_null(keys["stage"], self.stage), self.stage),
            )
            remaining = pyarrow.compute.sum(keep).as_py() or 0
            if remaining == 0:
                path.unlink()
                sync_folder(self.folder)
            elif remaining < keys.num_rows:
                _write_table(read_part(path).filter(keep), path)
        self._load_tail()

    def close(self) -> None:
        """Write the rest."""
        self.flush()

    def __enter__(self) -> RolloutWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_full_parts(self) -> None:
        while (end := _first_cut(self._rows, self.rows_per_part)) is not None:
            self._write_part(self._rows[:end])
            self._rows = self._rows[end:]
            self._number += 1
            self._dirty = bool(self._rows)

    def _write_part(self, rows: list[dict[str, Any]]) -> None:
        try:
            table = pyarrow.Table.from_pylist(rows, schema=SCHEMA)
        except (pyarrow.ArrowException, TypeError, ValueError) as error:
            raise DataError(f"a rollout does not fit the schema: {error}") from error
        _write_table(table, self.folder / f"part-{self._number:06d}.parquet")

    def _load_tail(self) -> None:
        """Take the unfinished last part into memory, so that it can grow."""
        parts = part_paths(self.folder)
        self._number = _number(parts[-1]) if parts else 0
        self._rows = read_part(parts[-1]).to_pylist() if parts else []
        self._dirty = False
        if _first_cut(self._rows, self.rows_per_part) is not None:
            self._number += 1
            self._rows = []


class MetricsWriter:
    """Appends one JSON object per line: stage, step, time and the numbers; NaN and infinities become null."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._cut_torn_line()
        self._file = self._open()

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Append one line and hand it to the system (a killed process loses nothing)."""
        clean = {k: (float(v) if math.isfinite(v) else None) for k, v in values.items()}
        line = json.dumps({"stage": stage, "step": step, "time": round(time.time(), 3), **clean})
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}; free space") from error

    def flush(self) -> None:
        """Write through to the disk; call it before a checkpoint becomes valid."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def truncate_after(self, stage: str, step: int) -> int:
        """Drop the lines of ``stage`` whose step is greater than ``step``; return the last step of the stage that there was."""
        rows = read_metrics(self.path)
        steps = [row.get("step", 0) if row.get("stage") == stage else 0 for row in rows]
        lines = [
            json.dumps(row) + "\n"
            for row, at in zip(rows, steps, strict=True)
            if row.get("stage") != stage or at <= step
        ]
        self._file.close()
        replace_text(self.path, "".join(lines))
        self._file = self._open()
        return max(steps, default=0)

    def close(self) -> None:
        """Write through to the disk and close; may be called twice."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Any:
        try:
            return self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from None

    def _cut_torn_line(self) -> None:
        """Cut off a last line without its end, so that the next line does not continue it."""
        if self.path.is_file():
            data = self.path.read_bytes()
            if data and not data.endswith(b"\n"):
                os.truncate(self.path, data.rfind(b"\n") + 1)


class NoRollouts(RolloutWriter):
    """Writes nothing: for the processes of a run that do not write."""

    def __init__(self) -> None:
        """Open nothing."""

    def _ignore(self, *_: Any, **__: Any) -> Any:
        return 0

    write = flush = truncate_after = _ignore


class NoMetrics(MetricsWriter):
    """Writes nothing: for the processes of a run that do not write."""

    def __init__(self) -> None:
        """Open nothing."""

    def _ignore(self, *_: Any, **__: Any) -> Any:
        return 0

    write = flush = truncate_after = close = _ignore


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; what is no line of ours (torn, no numbered step) is left out, a missing file is empty."""
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except DAMAGED:
                continue
            if isinstance(row, dict) and _is_line(row):
                large = {k: math.inf for k, v in row.items() if isinstance(v, int) and abs(v) >= 2**63}
                rows.append(row | large)
    return rows


def _is_line(row: Mapping[str, Any]) -> bool:
    step, at = row.get("step", 0), row.get("time", 0)
    return type(step) is int and 0 <= step < 2**63 and (at is None or isinstance(at, (int, float)))


_NAMES = frozenset(SCHEMA.names)


def _clean(row: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Return a copy with the stage filled in, rewards as pairs (NaN, "does not apply", as null) and valid UTF-8."""
    clean = dict(row)
    clean["stage"] = row.get("stage") or stage
    rewards = row.get("rewards") or {}
    pairs: Iterable[tuple[str, Any]] = rewards.items() if isinstance(rewards, Mapping) else rewards
    clean["rewards"] = [(k, None if v is None or math.isnan(v) else float(v)) for k, v in pairs]
    clean["turns"] = [valid_text(turn) for turn in row.get("turns") or ()] or None
    return valid_text(clean)


def valid_text(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose texts are valid UTF-8: a lone surrogate is written as an escape."""
    escaped = {
        name: value.encode("utf-8", errors="backslashreplace").decode("utf-8")
        for name, value in row.items()
        if isinstance(value, str) and not value.isascii()
    }
    return {**row, **escaped}


def _first_cut(rows: Sequence[Mapping[str, Any]], rows_per_part: int) -> int | None:
    """Return the number of rows in the first full part, or None when they do not fill one."""
    characters = 0
    for index, row in enumerate(rows[:rows_per_part], start=1):
        characters += len(row.get("prompt") or "") + len(row.get("completion") or "")
        if index == rows_per_part or characters >= _PART_CHARACTERS:
            return index
    return None


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("part-"))


def part_paths(folder: Path) -> list[Path]:
    """Return the parts in the order of their numbers."""
    return sorted((p for p in folder.glob("part-*.parquet") if p.stem[5:].isdigit()), key=_number)


def read_part(path: Path, columns: list[str] | None = None) -> pyarrow.Table:
    """Return a part, read through one open file: a writer that replaces it meanwhile does no harm.

    Raises:
        CheckpointError: It is damaged, or of another version.
    """
    try:
        table = _opened(path).read(columns=columns)
    except (OSError, pyarrow.ArrowException) as error:
        raise _damaged(path, error) from None
    if columns is None and not table.schema.equals(SCHEMA):
        lacks = ", ".join(sorted(set(SCHEMA.names) ^ set(table.column_names))) or "their types"
        raise CheckpointError(
            f"{path} was not written by this version of algorist (columns that differ: {lacks}); read it with the version in "
            f"{path.parent.parent / 'environment.json'}"
        )
    return table


def _opened(path: Path) -> pyarrow.parquet.ParquetFile:
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is damaged ({error}); move it away to continue without its rollouts")


def _write_table(table: pyarrow.Table, path: Path) -> None:
    replace_file(
        path,
        lambda partial: pyarrow.parquet.write_table(table, partial, compression="zstd", compression_level=1),
    )
