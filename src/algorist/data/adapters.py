"""The dataset ``local``: rows of a user's table or of any hub name; and how verl's rows are read, which need no names.

Published datasets are an extension.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from algorist.data.base import Source, dataset, refuse_unknown
from algorist.data.columns import Columns, cell, chat_text, load_source, pick_columns, to_problems, written
from algorist.data.files import Row
from algorist.data.golds import plain_number, stated_gold, with_points
from algorist.errors import DataError
from algorist.types import Problem

BEFORE = re.compile(r"\A\s*Solve the following math problem step by step\..*?\n\n", re.DOTALL)
AFTER = re.compile(
    r"\n\n(?:Remember to put your answer on its own line|Please reason step by step).*\Z", re.DOTALL
)


def plain_problem(prompt: Any) -> Any:
    """Return a DAPO prompt, a text or chat messages, without its instructions."""
    if isinstance(prompt, list):
        return [m | {"content": plain_problem(m.get("content"))} for m in prompt if isinstance(m, dict)]
    return AFTER.sub("", BEFORE.sub("", prompt)).strip() if isinstance(prompt, str) else prompt


def truth_of(row: Row) -> Any:
    """Return ``reward_model.ground_truth`` of a row in verl's layout, or None."""
    model = row.get("reward_model")
    return model.get("ground_truth") if isinstance(model, dict) else None


def verl_row(row: Row) -> Row:
    """Lift ``reward_model.ground_truth`` of verl's layout, where it is an object with a target, to the top."""
    truth, more = truth_of(row), row.get("extra_info")
    if not isinstance(truth, dict):
        return row
    names = {"question": "question", "problem": "question", "solution": "solution", "answer": "target"}
    lifted = {ours: truth[theirs] for ours, theirs in names.items() if truth.get(theirs) is not None}
    return {**row, **lifted, "id": more.get("index") if isinstance(more, dict) else None}


def demonstrated(column: str) -> Callable[[Row], dict[str, Any]]:
    """Return a reader of a row's own prompt and response, and of the answer that its demonstration states in ``column``."""

    def extra(row: Row) -> dict[str, Any]:
        shown = row.get(column)
        return written(row) | ({"demonstrated_answer": shown} if shown and isinstance(shown, str) else {})

    return extra


def verl_gold(row: Row) -> Any:
    golds = row.get("answer"), truth_of(row), row.get("solution")
    gold = next((gold for gold in golds if gold not in (None, "")), None)
    return plain_number(gold) if isinstance(gold, str | int | float) else gold


VERL = Columns(
    question=lambda row: plain_problem(row.get("prompt") or row.get("problem") or row.get("question")),
    answer=verl_gold,
    solution=lambda row: row.get("solution") if plain_number(row.get("solution")) != verl_gold(row) else "",
    identity=lambda row: (row.get("extra_info") or {}).get("index"),
)
"""Columns of DAPO's rows, and of others in verl's layout."""


@dataset("local")
def load_local(source: Source) -> list[Problem]:
    """JSONL, JSON, CSV, Parquet or a hub name; columns by ``data.….columns`` or by their usual names.

    Chat messages of one question and one reply (``messages``, ``conversations``, or a chat under ``prompt`` and ``completion``) are
    read as question and solution, with the reply's ``reasoning_content``, ``reasoning`` or ``thinking`` before it; their system
    message is not, since ``prompt`` has one.
    An answer column that holds a worked solution is read after ``####`` or in its last ``\\boxed{}``. The param
    ``answer_from`` (``as_is``, ``hash``, ``boxed``, ``auto``) fixes the way; ``auto`` is the default. With the param
    ``skip_bad_rows`` rows without question or answer are left out and counted; with ``decimal: ","`` the golds ``12,5`` and
    ``1.234,5`` are read as 12.5 and 1234.5. Rows in verl's layout (``prompt``, ``reward_model.ground_truth``) are read as ``dapo`` does.
    """
    rows = load_source(source, hub=None, where="local")
    refuse_unknown(source.params, ("answer_from", "skip_bad_rows", "decimal"), "local")
    where, skip_bad = source.path or source.hub or "local", bool(source.params.get("skip_bad_rows", False))
    if not source.columns and isinstance(rows[0].get("reward_model"), dict) and "answer" not in rows[0]:
        as_dapo = replace(VERL, skip_bad=skip_bad)
        return to_problems([verl_row(row) for row in rows], as_dapo, where=where)
    every = rows[0] | {name: value for row in rows for name, value in row.items() if name not in rows[0]}
    names = pick_columns(every, source.columns, where=where)
    way, decimal = source.params.get("answer_from", "auto"), source.params.get("decimal", ".")
    if way not in ("as_is", "hash", "boxed", "auto"):
        raise DataError(f"data.….params.answer_from is '{way}'; expected as_is, hash, boxed or auto")
    if decimal not in (".", ","):
        raise DataError(f"data.….params.decimal is {decimal!r}; expected '.' or ','")

    def stated(row: Row) -> object:
        return stated_gold(chat_text(cell(row, names["answer"]), "assistant"), way)

    def worked(row: Row) -> object:
        """Return the answer's cell where it is a worked solution; a bare answer shows no work."""
        own = cell(row, names["answer"])
        return None if stated(row) is own else own

    columns: dict[str, Any] = {
        "identity" if field == "id" else field: column for field, column in names.items()
    }
    gold = (lambda row: with_points(stated(row))) if decimal == "," else stated
    columns |= {"answer": gold, "extra": demonstrated("demonstrated_answer")}
    if names.get("solution") == names["answer"] and any(map(worked, rows)):
        columns["solution"] = worked
    return to_problems(rows, Columns(**columns, skip_bad=skip_bad), where=where)
