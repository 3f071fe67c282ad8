"""From rows to problems: which column is what, stable ids, and gold answers that are there."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from algorist.data.base import Source, id_of
from algorist.data.files import Row, read_hub, read_rows
from algorist.errors import DataError, check_known, nearest
from algorist.types import Problem
from algorist_grader.text import stripped

log = logging.getLogger("algorist.data.columns")
_SURROGATE = re.compile("[\ud800-\udfff]")

ALIASES = {
    "question": ("question", "problem", "prompt", "Question", "input", "messages", "conversations"),
    "answer": ("answer", "expected_answer", "final_answer", "ground_truth", "reference_answer", "gold"),
    "solution": (
        "solution", "generated_solution", "reference_solution", "reasoning", "response", "completion", "messages", "conversations",
    ),
    "subject": ("subject", "type", "category", "problem_type"),
    "level": ("level", "difficulty"),
    "checker": ("checker",),
    "id": ("id", "unique_id", "problem_id", "idx"),
}  # fmt: skip
FIELDS = tuple(ALIASES)
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
"""The speaker of a chat message, by its ``role`` or (ShareGPT's) ``from``."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of what an assistant thought before its message."""
OF_THE_CALL = (
    "prompts", "completions", "completion", "completion_ids", "parsed", "log_metric", "trainer_state",
)  # fmt: skip
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


Column = str | tuple[str, ...] | Callable[[Row], Any]
"""A column's name, several (the first that is not empty counts), or what works the value out of the row."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns of a table by role, and the gaps that its rows may have."""

    question: Column
    answer: Column
    solution: Column = ""
    subject: Column = ""
    level: Column = ""
    identity: Column = ""
    checker: Column = ""
    extra: Callable[[Row], dict[str, Any]] = lambda row: {}
    """Further columns for rewards, besides those of the row."""
    known_gaps: int = 0
    """Rows without question or gold answer that the published dataset is known to have."""
    skip_bad: bool = False
    needs_solution: bool = False
    gold_name: str = "gold answer"


def load_source(source: Source, *, hub: str | None, subset: Sequence[str] = (), where: str) -> list[Row]:
    """Read the rows of ``source``: its path, its hub name, or the adapter's own hub dataset with all of its ``subset``.

    Raises:
        DataError: Nothing to read from, or unreadable; or columns are named for an adapter that knows its own.
    """
    if source.columns and hub is not None:
        mapped = ", ".join(f"{ours}: {theirs}" for ours, theirs in source.columns.items())
        raise DataError(
            f"{where} reads the columns of its own dataset, not data.….columns ({mapped}). To choose columns take the adapter "
            "local: name: local, with path or hub beside it"
        )
    if source.path is not None:
        return read_rows(source.path, split=source.split)
    name = source.hub or hub
    apart = len(subset) > 1 and name == hub  # another dataset's subsets are its own
    subsets = subset if not source.subset and (apart or len(subset) == 1) else [source.subset]
    if name is None:
        raise DataError(
            f"dataset '{where}' needs data.….path (a .jsonl, .json, .csv, .tsv or .parquet file) or data.….hub"
        )
    return [row for one in subsets for row in read_hub(name, subset=one, split=source.split)]


def to_problems(rows: list[Row], columns: Columns, *, where: str) -> list[Problem]:
    """Turn rows into problems; a row without question or gold answer (or solution, if needed) is an error that names the row.

    Up to ``known_gaps`` such rows are left out with a line in the log; with ``skip_bad`` as many as there are. Rows are numbered
    from 1, as in the file without its header. ``extra`` of a problem has every column of its row, which rewards may ask for by name.

    Raises:
        DataError: A row lacks its question or its gold answer; the first three such rows are named.
    """
    problems, bad, unread, with_system = [], [], [], 0
    seen: set[str] = set()
    for number, row in enumerate(map(_known, rows), start=1):
        values = [_value(row, column) for column in (columns.question, columns.answer, columns.solution)]
        with_system += any(who == "system" for who, _ in _turns(values[0]))
        values[0], values[2] = chat_text(values[0], "user"), chat_text(values[2], "assistant", THOUGHTS)
        if isinstance(values[2], list) and all(isinstance(line, str) for line in values[2]):
            values[2] = "\n".join(values[2])
        elif kind := _no_text(values[2]):
            unread.append(f"row {number} has {kind}: {str(row)[:160]}")
            values[2] = None
        question, gold, solution = map(_text, values)
        if not question or not gold or (columns.needs_solution and not solution):
            lack = "question" if not question else columns.gold_name if not gold else "solution"
            bad.append(f"row {number} has no {lack}: {str(row)[:160]}")
            continue
        if odd := next((kind for value in values[:2] if (kind := _no_text(value))), ""):
            bad.append(f"row {number} has {odd} where a text is expected: {str(row)[:160]}")
            continue
        if any(_SURROGATE.search(text) for text in (question, gold, solution)):
            bad.append(f"row {number} holds half a character (a lone surrogate): {ascii(row)[:160]}")
            continue
        problem_id = _text(_value(row, columns.identity)) or id_of(question)
        while problem_id in seen:
            problem_id = f"{problem_id}-{number - 1}"
        seen.add(problem_id)
        optional = columns.subject, columns.level, columns.checker
        subject, level, checker = (_text(_value(row, column)) for column in optional)
        extra = _others(row) | columns.extra(row)
        problems.append(Problem(problem_id, question, gold, solution, subject, level, extra, checker))
    if with_system:
        log.warning(
            "dataset '%s': %d of %d chats begin with a system message, which is not read: prompt.system_prompt gives the model one",
            where, with_system, len(rows),
        )  # fmt: skip
    if unread:
        log.warning(
            "dataset '%s': %d solutions are no text and not read, the first: %s",
            where,
            len(unread),
            unread[0],
        )
    if bad and (len(bad) <= columns.known_gaps or (columns.skip_bad and problems)):
        log.warning(
            "dataset '%s': %d of %d rows are left out, the first: %s", where, len(bad), len(rows), bad[0]
        )
    elif bad:
        shown = "\n  ".join(bad[:3])
        raise DataError(
            f"dataset '{where}': {len(bad)} of {len(rows)} rows cannot be used:\n  {shown}\n"
            "Correct or remove these rows, map the right columns with data.….columns.question=COLUMN, or leave such rows out (adapter local): "
            "data.….params.skip_bad_rows=true"
        )
    return problems


def chat_text(value: Any, role: str, before: Sequence[str] = ()) -> Any:
    """Return the text of ``role`` (user, assistant) in chat messages of one question and at most one reply; another value as it is.

    The first key of ``before`` that a message has goes before its text.
    """
    turns = _turns(value, before)
    plain = [who for who, _ in turns if who != "system"] in (["user"], ["assistant"], ["user", "assistant"])
    return "".join(text for who, text in turns if who == role) if plain else value


def _turns(value: Any, before: Sequence[str] = ()) -> list[tuple[str, str]]:
    """List speaker and text of chat messages; an empty list for another value, and for messages that are not all texts."""
    turns = []
    for message in value if isinstance(value, list) else ():
        sender = str(message.get("role") or message.get("from")) if isinstance(message, dict) else ""
        text = message.get("content") or message.get("value") if sender else None
        if sender not in ROLES or not isinstance(text, str):
            return []
        thoughts = [thought for key in before if isinstance(thought := message.get(key), str) and thought][:1]
        turns.append((ROLES[sender], "\n\n".join([*thoughts, text])))
    return turns


def written(row: Row) -> dict[str, Any]:
    """Return a row's own ``prompt`` and ``response`` (or ``completion``) texts, for SFT on them as they are."""
    response = row.get("response") or row.get("completion")
    both = isinstance(row.get("prompt"), str) and isinstance(response, str)
    return {"prompt": row["prompt"], "response": response} if both else {}


def pick_columns(row: Row, mapping: dict[str, str], *, where: str) -> dict[str, str]:
    """Return our field name → column name for a table, from the user's mapping and the usual aliases.

    Raises:
        ColumnError: Question or answer cannot be found.
        DataError: A mapped column or a mapped field does not exist.
    """
    for name in sorted(mapping):
        check_known(name, FIELDS, f"{where}: columns are named for the field '{name}'", kind=DataError)
    for field, column in mapping.items():
        check_known(
            column, with_inner(row), f"{where}: no column '{column}' for {field}", "Columns: {}", DataError
        )
    usual = {field: next((a for a in names if a in row), "") for field, names in ALIASES.items()}
    columns = {field: name for field in FIELDS if (name := mapping.get(field, usual[field]))}
    if "solution" in columns:
        columns.setdefault("answer", columns["solution"])
    lacking = tuple(field for field in ("question", "answer") if field not in columns)
    if lacking:
        lack = " and ".join(
            f"no '{field}' field (looked for {', '.join(ALIASES[field])})" for field in lacking
        )
        way = " ".join(f"data.….columns.{field}=COLUMN" for field in lacking)
        raise ColumnError(where, lacking, f"{lack}. Columns: {', '.join(map(str, row))}", way)
    return columns


def require_columns(rows: list[Row], *choices: tuple[str, ...], where: str) -> None:
    """Check that the first row has at least one column of each group of alternatives.

    Raises:
        DataError: A group without any; the message names the missing field and the columns of the file.
    """
    for names in choices:
        if not any(name in rows[0] for name in names):
            raise DataError(
                f"dataset '{where}': the training dataset has no '{names[0]}' field (looked for {' or '.join(names)})."
                f"{nearest(names[0], rows[0])} Columns: {', '.join(map(str, rows[0]))}. Give a file with this column, "
                "or read yours with the adapter 'local' and data.….columns"
            )


def _value(row: Row, column: Column) -> Any:
    if callable(column):
        return column(row)
    value = None
    for name in (column,) if isinstance(column, str) else column:
        value = cell(row, name) if name else None  # a table that pandas wrote has a column without a name
        if value or value == 0:
            break
    return value


def _known(row: Row) -> Row:
    """Return a row whose cells of NaN are empty, which they are in a table."""
    return {name: value if value == value else None for name, value in row.items()}


def cell(row: Row, name: str) -> Any:
    """Return a row's cell, or one inside of its objects by a dotted name; None where it has none."""
    return row.get(name) if name in row or "." not in name else with_inner(row).get(name)


def with_inner(row: Row, levels: int = 4) -> Row:
    """Return a row with what its objects hold, too: ``item.answer`` is the ``answer`` of the column ``item``."""
    inner = {
        f"{name}.{key}": value
        for name, column in row.items()
        if levels and isinstance(column, dict)
        for key, value in with_inner(column, levels - 1).items()
    }
    return {**inner, **row} if inner else row


def _text(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if isinstance(value, list) and len(value) == 1:
        return _text(value[0])
    return stripped(str(value))


def _no_text(value: Any) -> str:
    """Name the kind of a value that has no text of its own, or return an empty string."""
    inside = value if isinstance(value, list) else [value]
    kinds = {
        "chat messages (of more than one question and one reply) or an object": any(
            isinstance(part, dict) for part in inside
        ),
        "bytes": any(isinstance(part, bytes) for part in inside),
        "null in a list": len(inside) > 1 and None in inside,
        "several values in one cell (all of them in one text, or one of them)": len(inside) > 1,
        "infinity as a number": any(isinstance(part, float) and math.isinf(part) for part in inside),
    }
    return next((kind for kind, holds in kinds.items() if holds), "")


def _others(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that a row has a value in, for rewards that ask for them by name."""
    return {k: v for k, v in row.items() if isinstance(k, str) and v is not None and k not in OF_THE_CALL}
