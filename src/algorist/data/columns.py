"""From rows to problems: which column is what, stable ids, and gold answers that are there."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from typing import Any

from algorist.data.base import Source, id_of
from algorist.data.files import Row, read_hub, read_rows
from algorist.errors import DataError, nearest
from algorist.types import Problem

log = logging.getLogger("algorist.data")
_SURROGATE = re.compile("[\ud800-\udfff]")

ALIASES = {
    "question": ("question", "problem", "prompt", "Question", "input"),
    "answer": ("answer", "expected_answer", "final_answer", "ground_truth", "reference_answer", "gold"),
    "solution": ("solution", "generated_solution", "reference_solution", "reasoning", "response"),
    "subject": ("subject", "type", "category", "problem_type"),
    "level": ("level", "difficulty"),
    "checker": ("checker",),
    "id": ("id", "unique_id", "problem_id", "idx"),
}
FIELDS = tuple(ALIASES)
OF_THE_CALL = (
    "prompts",
    "completions",
    "completion",
    "completion_ids",
    "parsed",
    "log_metric",
    "trainer_state",
)
"""Names under which rewards get something else than a column of the data."""


class ColumnError(DataError):
    """``where`` has no column for ``fields``; ``named_by`` is the same error with another way to name the columns."""

    def __init__(self, where: str, fields: tuple[str, ...], lack: str, way: str) -> None:
        super().__init__(where, fields, lack, way)
        self.where, self.fields, self.lack, self.way = where, fields, lack, way

    def __str__(self) -> str:
        return f"{self.where} has {self.lack}. Name yours: {self.way}"

    def named_by(self, way: str) -> ColumnError:
        """Return the error with ``way`` in place of the recipe's keys."""
        return ColumnError(self.where, self.fields, self.lack, way)


def ground_truth(row: Row) -> Any:
    """Return ``reward_model.ground_truth`` of a row in verl's layout, or None."""
    model = row.get("reward_model")
    return model.get("ground_truth") if isinstance(model, dict) else None


def load_source(source: Source, *, hub: str | None, subset: str | None = None, where: str) -> list[Row]:
    """Read the rows of ``source``: its path, its hub name, or the adapter's own hub dataset.

    Raises:
        DataError: Nothing to read from, or unreadable; or columns are named for an adapter that knows its own.
    """
    if source.columns and hub is not None:
        wanted = ", ".join(f"{ours}: {theirs}" for ours, theirs in source.columns.items())
        raise DataError(
            f"{where} reads the columns of its own dataset, not data.….columns ({wanted}). To choose columns take the adapter "
            "local: name: local, with path or hub beside it"
        )
    if source.path is not None:
        return read_rows(source.path, split=source.split)
    name = source.hub or hub
    if name is None:
        raise DataError(
            f"dataset '{where}' needs data.….path (a .jsonl, .json, .csv or .parquet file) or data.….hub"
        )
    return read_hub(name, subset=source.subset or subset, split=source.split)


def to_problems(
    rows: list[Row],
    *,
    where: str,
    question: Callable[[Row], Any],
    answer: Callable[[Row], Any],
    solution: Callable[[Row], Any] = lambda row: "",
    subject: Callable[[Row], Any] = lambda row: "",
    level: Callable[[Row], Any] = lambda row: "",
    identity: Callable[[Row], Any] = lambda row: None,
    checker: Callable[[Row], Any] = lambda row: "",
    extra: Callable[[Row], dict[str, Any]] = lambda row: {},
    known_gaps: int = 0,
    skip_bad: bool = False,
    needs_solution: bool = False,
    gold_name: str = "gold answer",
) -> list[Problem]:
    """Turn rows into problems; a row without question or gold answer (or solution, if needed) is an error that names the row.

    ``known_gaps`` is the number of such rows that the published dataset is known to have: up to that many are left
    out with a line in the log; with ``skip_bad`` as many as there are. Rows are numbered from 1, as in the file without its
    header. ``extra`` of a problem has every column of its row, which rewards may ask for by name.

    Raises:
        DataError: A row lacks its question or its gold answer; the first three such rows are named.
    """
    problems, bad = [], []
    seen: set[str] = set()
    for number, row in enumerate(rows, start=1):
        asked, gold, worked = _text(question(row)), _text(answer(row)), _text(solution(row))
        if not asked or not gold or (needs_solution and not worked):
            lack = "question" if not asked else gold_name if not gold else "solution"
            bad.append(f"row {number} has no {lack}: {str(row)[:160]}")
            continue
        if odd := next((kind for value in (question(row), answer(row)) if (kind := _no_text(value))), ""):
            bad.append(f"row {number} has {odd} where a text is expected: {str(row)[:160]}")
            continue
        if any(_SURROGATE.search(text) for text in (asked, gold, worked)):
            bad.append(f"row {number} holds half a character (a lone surrogate): {ascii(row)[:160]}")
            continue
        problem_id = _text(identity(row)) or id_of(asked)
        while problem_id in seen:
            problem_id = f"{problem_id}-{number - 1}"
        seen.add(problem_id)
        problems.append(
            Problem(
                problem_id,
                asked,
                gold,
                worked,
                _text(subject(row)),
                _text(level(row)),
                _others(row) | extra(row),
                _text(checker(row)),
            )
        )
    if bad and (len(bad) <= known_gaps or (skip_bad and problems)):
        log.warning(
            "dataset '%s': %d of %d rows are left out, such as %s", where, len(bad), len(rows), bad[0]
        )
    elif bad:
        shown = "\n  ".join(bad[:3])
        raise DataError(
            f"dataset '{where}': {len(bad)} of {len(rows)} rows cannot be used:\n  {shown}\n"
            "Correct or remove these rows, map the right columns with data.….columns, or leave such rows out (adapter local): "
            "data.train.params.skip_bad_rows=true in a recipe, local,params.skip_bad_rows=true for data and eval"
        )
    return problems


def written(row: Row) -> dict[str, Any]:
    """Return a row's own ``prompt`` and ``response`` (or ``completion``) texts, for SFT on them as they are."""
    response = row.get("response") or row.get("completion")
    both = isinstance(row.get("prompt"), str) and isinstance(response, str)
    return {"prompt": row["prompt"], "response": response} if both else {}


def pick_columns(row: Row, wanted: dict[str, str], *, where: str) -> dict[str, str]:
    """Return our field name → column name for a table, from the user's mapping and the usual aliases.

    Raises:
        ColumnError: Question or answer cannot be found.
        DataError: A mapped column or a mapped field does not exist.
    """
    unknown = set(wanted) - set(FIELDS)
    if unknown:
        name = sorted(unknown)[0]
        raise DataError(
            f"{where}: columns are named for the field '{name}'.{nearest(name, FIELDS)} Expected: {', '.join(FIELDS)}"
        )
    found = {}
    for field in FIELDS:
        if field in wanted:
            if wanted[field] not in row:
                raise DataError(
                    f"{where}: no column '{wanted[field]}' for {field}.{nearest(wanted[field], row)} "
                    f"Columns: {', '.join(map(str, row))}"
                )
            found[field] = wanted[field]
        else:
            alias = next((a for a in ALIASES[field] if a in row), None)
            if alias is not None:
                found[field] = alias
    if "answer" not in found and "solution" in found:
        found["answer"] = found["solution"]
    lacking = tuple(field for field in ("question", "answer") if field not in found)
    if lacking:
        lack = " and ".join(
            f"no '{field}' field (looked for {', '.join(ALIASES[field])})" for field in lacking
        )
        way = " ".join(f"data.train.columns.{field}=COLUMN" for field in lacking)
        raise ColumnError(where, lacking, f"{lack}. Columns: {', '.join(map(str, row))}", way)
    return found


def _text(value: Any) -> str:
    if value is None or value != value:  # a table's NaN is an empty cell
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if isinstance(value, list) and len(value) == 1:
        return _text(value[0])
    return str(value).strip()


def _no_text(value: Any) -> str:
    """Return what a value is that has no text of its own, or an empty string."""
    inside = value if isinstance(value, list) else [value]
    kinds = {
        "chat messages or an object": any(isinstance(part, dict) for part in inside),
        "bytes": any(isinstance(part, bytes) for part in inside),
        "null in a list": len(inside) > 1 and None in inside,
        "infinity as a number": any(isinstance(part, float) and math.isinf(part) for part in inside),
    }
    return next((kind for kind, holds in kinds.items() if holds), "")


def _others(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that a row has a value in, for rewards that ask for them by name."""
    return {k: v for k, v in row.items() if isinstance(k, str) and v is not None and k not in OF_THE_CALL}
