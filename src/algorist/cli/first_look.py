"""A user's data file at first sight: which column is what, what the grader makes of the answers, how long the texts are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from algorist.config.schema import DatasetSection
from algorist.data import load_problems
from algorist.data.columns import ALIASES, with_inner
from algorist.data.files import Row, read_rows
from algorist.data.golds import GoldCheck, check_golds
from algorist.errors import DataError, nearest
from algorist.types import Problem
from algorist_grader import hash_answer, last_boxed, numeric_value

FIELDS = ("question", "answer", "solution")
LEAST_ROWS = 5
"""Fewer leave nothing to hold out."""
SAMPLE = 200
"""Rows that columns are guessed from."""
GRADED = 2000
"""Rows whose gold answers are graded; ``algorist data check`` grades all."""
OTHER_NAMES = {
    "question": ("instruction", "query", "task", "q", "frage", "aufgabe", "pregunta", "pergunta", "domanda", "问题"),
    "answer": ("result", "label", "target", "output", "a", "antwort", "ergebnis", "respuesta", "resposta", "risposta", "réponse", "答案"),
    "solution": ("rationale", "explanation", "cot", "steps", "working", "lösung", "rechnung", "solución", "solução", "soluzione", "解答"),
}  # fmt: skip


@dataclass
class DataFile:
    """A data file, with the columns that it is read by."""

    path: str
    """As the recipe names it."""
    rows: list[Row]
    columns: dict[str, str]
    """Field (question, answer, solution) → column."""
    problems: list[Problem] = field(default_factory=list)
    golds: GoldCheck = field(default_factory=GoldCheck)
    decimal: str = "."

    @property
    def left_out(self) -> int:
        """Rows without a question or an answer."""
        return len(self.rows) - len(self.problems)

    @property
    def has_solutions(self) -> bool:
        return any(p.solution for p in self.problems)

    @property
    def matcher(self) -> str:
        """``numeric`` where every gold answer is one number."""
        numbers = all(numeric_value(p.answer) is not None for p in self.problems[:GRADED])
        return "numeric" if numbers else "symbolic"

    def params(self) -> dict[str, Any]:
        """Return the params of the adapter ``local`` that read every usable row."""
        skip = {"skip_bad_rows": True} if self.left_out else {}
        return skip | ({"decimal": ","} if self.decimal == "," else {})


def look_at(path: str, columns: Mapping[str, str | None]) -> DataFile:
    """Read a file and name the columns that were not named; a field that is mapped to None has none.

    Raises:
        DataError: Unreadable, fewer than ``LEAST_ROWS`` rows, or no such column.
    """
    rows = [with_inner(row) for row in read_rows(path)]
    if len(rows) < LEAST_ROWS:
        raise DataError(
            f"{path} has {len(rows)} row{'s' * (len(rows) > 1)}; expected at least {LEAST_ROWS}, since a part is held out to "
            "measure with"
        )
    if number := next((c for c in rows[0] if numeric_value(str(c)) is not None), None):
        raise DataError(
            f"{path}: the first line should name the columns, but has the number {number}. If it is a row, write a line such as "
            "question,answer above it"
        )
    for name, column in columns.items():
        if column is not None and column not in rows[0]:
            raise DataError(
                f"{path}: no column '{column}' for the {name}.{nearest(column, rows[0])} Columns: {', '.join(map(str, rows[0]))}"
            )
    guess = guess_columns(rows[:SAMPLE], {name: c for name, c in columns.items() if c is not None})
    named = {name: column for name, column in guess.items() if columns.get(name, "") is not None}
    return DataFile(path, rows, named)


def read_problems(file: DataFile, decimal: str | None = None) -> None:
    """Fill in a file's problems and what the grader makes of their answers.

    Args:
        file: With its question and answer columns.
        decimal: The decimal sign; None guesses it: a comma where gold answers look so and none has a decimal point.

    Raises:
        DataError: No question or answer column, or no usable row.
    """
    lacking = [name for name in ("question", "answer") if name not in file.columns]
    if lacking:
        flags = " ".join(f"--{name} COLUMN" for name in lacking)
        raise DataError(
            f"{file.path}: which column has the {' and the '.join(lacking)}? Columns: {', '.join(map(str, file.rows[0]))}. "
            f"Name yours: {flags}"
        )
    if decimal not in (None, ".", ","):
        raise DataError(f"--decimal is '{decimal}'; expected . or ,")
    file.problems = _problems(file, ".")
    if decimal is None:
        commas = {p.id for p in check_golds(file.problems[:GRADED]).decimal_commas}
        points = any(_has_point(p.answer) for p in file.problems if p.id not in commas)
        decimal = "," if commas and not points else "."
    file.decimal = decimal
    if decimal == ",":
        file.problems = _problems(file, ",")
    if len(file.problems) < LEAST_ROWS:
        raise DataError(
            f"{file.path}: {len(file.problems)} of {len(file.rows)} rows have both a {file.columns['question']} and a "
            f"{file.columns['answer']}; expected at least {LEAST_ROWS}"
        )
    file.golds = check_golds(file.problems[:GRADED])


def _problems(file: DataFile, decimal: str) -> list[Problem]:
    section = {"name": "local", "path": file.path, "columns": file.columns}
    params = {"decimal": decimal}
    try:
        return load_problems(DatasetSection.model_validate({**section, "params": params}))
    except DataError as error:
        if "cannot be used" not in str(error):
            raise
    return load_problems(
        DatasetSection.model_validate({**section, "params": {**params, "skip_bad_rows": True}})
    )


def _has_point(gold: str) -> bool:
    return "." in gold and "," not in gold and numeric_value(gold) is not None


def guess_columns(rows: Sequence[Row], named: Mapping[str, str]) -> dict[str, str]:
    """Return field → column: as named, else by the usual names, else by what the columns hold."""
    columns, taken = dict(named), set(named.values())
    for name in FIELDS:
        if name in columns:
            continue
        usual = (*ALIASES[name], *OTHER_NAMES[name])
        free = [c for c in rows[0] if c not in taken or (name == "solution" and isinstance(rows[0][c], list))]
        by_name = [c for alias in usual for c in free if str(c).lower() == alias.lower()]
        by_name += [c for alias in usual for c in free if str(c).lower().endswith(f".{alias.lower()}")]
        if by_name:
            columns[name] = by_name[0]
            taken.add(by_name[0])
    texts = {
        column: [str(row[column]).strip() if row.get(column) is not None else "" for row in rows]
        for column in rows[0]
        if column not in taken and all(isinstance(row.get(column), str | int | float | None) for row in rows)
    }
    if "question" not in columns and (asking := _questions(texts)):
        columns["question"] = asking
        texts.pop(asking)
    if "answer" not in columns and (short := _answers(texts)):
        columns["answer"] = short
        texts.pop(short)
    if "answer" not in columns and isinstance(rows[0].get(columns.get("solution", "")), list):
        columns["answer"] = columns["solution"]
    if "answer" in columns and "solution" not in columns:
        golds = [str(row.get(columns["answer"]) or "").strip() for row in rows]
        if 2 * sum(bool(hash_answer(gold) or last_boxed(gold)) for gold in golds) > len(golds):
            columns["solution"] = columns["answer"]
        elif worked := next((c for c, cells in texts.items() if _works_out(cells, golds)), None):
            columns["solution"] = worked
    return columns


def _questions(texts: Mapping[str, Sequence[str]]) -> str | None:
    """Return the column whose texts ask: most question marks, then the longest."""

    def rank(column: str) -> tuple[float, float]:
        cells = texts[column]
        asks = sum("?" in cell or "？" in cell for cell in cells) / len(cells)
        return round(asks, 1), sum(map(len, cells)) / len(cells)

    best = max(texts, key=rank, default=None)
    return best if best is not None and rank(best)[1] >= 5 else None


def _answers(texts: Mapping[str, Sequence[str]]) -> str | None:
    """Return the first column of numbers, one that numbers the rows last."""
    numbers = {}
    for column, cells in texts.items():
        values = [value for cell in cells if (value := numeric_value(cell)) is not None]
        if len(set(values)) > 1 and len(values) >= 0.8 * len(cells):
            span = max(values) - min(values) + 1
            numbers[column] = len(set(values)) == len(values) == span
    return min(numbers, key=lambda column: numbers[column], default=None)


def _works_out(cells: Sequence[str], golds: Sequence[str]) -> bool:
    """Return whether a column's texts are longer than the answers and mostly have them inside."""
    inside = sum(bool(gold) and gold in cell for cell, gold in zip(cells, golds, strict=True))
    return inside >= 0.8 * len(cells) and sum(map(len, cells)) > 3 * sum(map(len, golds))
