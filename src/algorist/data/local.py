"""Any file or hub dataset with a question and an answer column."""

from __future__ import annotations

import re
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
    ``skip_bad_rows`` rows without question or answer are left out and counted; with ``decimal: ","`` the golds ``12,5`` and
    ``1.234,5`` are read as 12.5 and 1234.5.
    """
    rows = load_source(source, hub=None, where="local")
    refuse_unknown(source.params, ("answer_from", "skip_bad_rows", "decimal"), "local")
    where = source.path or source.hub or "local"
    names = pick_columns(rows[0], source.columns, where=where)
    way = source.params.get("answer_from", "auto")
    if way not in ("as_is", "hash", "boxed", "auto"):
        raise DataError(f"data.….params.answer_from is '{way}'; expected as_is, hash, boxed or auto")

    decimal = source.params.get("decimal", ".")
    if decimal not in (".", ","):
        raise DataError(f"data.….params.decimal is {decimal!r}; expected '.' or ','")

    def column(field: str) -> Callable[[Mapping[str, Any]], Any]:
        return (lambda row: row.get(names[field])) if field in names else (lambda row: "")

    answer = column("answer")
    return to_problems(
        rows,
        where=where,
        question=column("question"),
        answer=lambda row: (with_points if decimal == "," else _as_is)(_gold(answer(row), way)),
        solution=column("solution"),
        subject=column("subject"),
        level=column("level"),
        identity=column("id"),
        checker=column("checker"),
        extra=_extra,
        skip_bad=bool(source.params.get("skip_bad_rows", False)),
    )


def _extra(row: dict[str, Any]) -> dict[str, Any]:
    shown = row.get("demonstrated_answer")  # of ``algorist data sample``
    return written(row) | ({"demonstrated_answer": shown} if isinstance(shown, str) else {})


def _gold(value: object, way: str) -> object:
    if not isinstance(value, str) or way == "as_is":
        return value
    if way == "hash" or (way == "auto" and "####" in value):
        return extract_hash_answer(value) if "####" in value else ""
    if way == "boxed" or (way == "auto" and "\\boxed" in value):
        return last_boxed(value)
    return value


_LOCAL = r"(?:\d{1,3}(?:\.\d{3})+|\d+)(?:,|\{,\})\d+"
_NUMBER = re.compile(rf"(?<![\d.,}}])(?:{_LOCAL}|\d{{1,3}}(?:\.\d{{3}})+)(?![\d.,]|\{{,\}})")
_ONE_NUMBER = re.compile(rf"[^\d.,()\[\]]*{_LOCAL}[^\d.,()\[\]]*")
_THOUSANDS = re.compile(r"(?<!\d)[1-9]\d{0,2}(?:(?:,|\{,\})\d{3})+(?!\d)")


def may_be_decimal(gold: str) -> bool:
    """Say whether a gold answer may be one number with a decimal comma: ``12,5``, ``1.234,5``, ``12,5 %``."""
    return bool(_ONE_NUMBER.fullmatch(gold)) and not _THOUSANDS.search(gold)


def with_points(value: object) -> object:
    """Return a gold answer, or each of several, with decimal points in place of decimal commas and no points of thousands."""
    if isinstance(value, (list, tuple)):
        return [with_points(one) for one in value]
    if not isinstance(value, str):
        return value
    return _NUMBER.sub(lambda m: re.sub(r",|\{,\}", "!", m[0]).replace(".", "").replace("!", "."), value)


def _as_is(value: object) -> object:
    return value
