"""Any file or hub dataset with a question and an answer column."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from algorist.data.base import Source, dataset, refuse_unknown
from algorist.data.columns import load_source, pick_columns, to_problems, written
from algorist.data.gsm8k import extract_hash_answer
from algorist.errors import DataError
from algorist.grading import last_boxed
from algorist.types import Problem


@dataset("local")
def load_local(source: Source) -> list[Problem]:
    """JSONL, JSON, CSV, Parquet or a hub name; columns by ``data.….columns`` or by their usual names.

    An answer column that holds a worked solution is read behind ``####`` or in its last ``\\boxed{}``. The param
    ``answer_from`` (``as_is``, ``hash``, ``boxed``, ``auto``) fixes the way; ``auto`` is the default. With the param
    ``skip_bad_rows`` rows without question or answer are left out and counted.
    """
    rows = load_source(source, hub=None, where="local")
    refuse_unknown(source.params, ("answer_from", "skip_bad_rows"), "local")
    where = source.path or source.hub or "local"
    names = pick_columns(rows[0], source.columns, where=where)
    way = source.params.get("answer_from", "auto")
    if way not in ("as_is", "hash", "boxed", "auto"):
        raise DataError(f"data.….params.answer_from is '{way}'; expected as_is, hash, boxed or auto")

    def column(field: str) -> Callable[[Mapping[str, Any]], Any]:
        return (lambda row: row.get(names[field])) if field in names else (lambda row: "")

    answer = column("answer")
    return to_problems(
        rows,
        where=where,
        question=column("question"),
        answer=lambda row: _gold(answer(row), way),
        solution=column("solution"),
        subject=column("subject"),
        level=column("level"),
        identity=column("id"),
        checker=column("checker"),
        extra=written,
        skip_bad=bool(source.params.get("skip_bad_rows", False)),
    )


def _gold(value: object, way: str) -> object:
    if not isinstance(value, str) or way == "as_is":
        return value
    if way == "hash" or (way == "auto" and "####" in value):
        return extract_hash_answer(value) if "####" in value else ""
    if way == "boxed" or (way == "auto" and "\\boxed" in value):
        return last_boxed(value)
    return value
