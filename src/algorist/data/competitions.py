"""Contest problems for evaluation: AIME, AMC, OlympiadBench, Gaokao."""

from __future__ import annotations

import re
from typing import Any

from algorist.data.base import Source, dataset
from algorist.data.cleaning import own_split, plain_number, without_dollars
from algorist.data.columns import ground_truth, load_source, to_problems
from algorist.data.files import Row
from algorist.errors import DataError, nearest
from algorist.grading import last_boxed
from algorist.types import Problem

AIME_HUBS = {24: "math-ai/aime24", 25: "math-ai/aime25"}


@dataset("aime")
def load_aime(source: Source) -> list[Problem]:
    """AIME 2024 or 2025 (params: ``year`` 24 or 25); golds are integers without leading zeros."""
    year = source.params.get("year", 24)
    if year not in (24, 25, 2024, 2025) or set(source.params) - {"year"}:
        wrong = sorted(set(source.params) - {"year"})
        near = nearest(wrong[0], ["year"]) if wrong else nearest(str(year), ["24", "25"])
        raise DataError(
            f"aime: data.….params is {source.params}.{near} Expected year: 24 or year: 25; for another year give "
            "data.….path or data.….hub"
        )
    return to_problems(
        [_flat(row) for row in load_source(source, hub=AIME_HUBS[year % 100], where="aime")],
        where="aime",
        question=_question,
        answer=lambda row: _integer(row.get("answer") or last_boxed(str(row.get("solution", "")))),
        solution=lambda row: row.get("solution"),
        identity=lambda row: row.get("id"),
    )


@dataset("amc")
def load_amc(source: Source) -> list[Problem]:
    """AMC 12 2023 without choices (math-ai/amc23); golds are numbers, ``27.0`` read as ``27``."""
    return to_problems(
        [_flat(row) for row in load_source(source, hub="math-ai/amc23", where="amc")],
        where="amc",
        question=_question,
        answer=lambda row: plain_number(row.get("answer")),
        identity=lambda row: row.get("id"),
    )


@dataset("olympiadbench")
def load_olympiadbench(source: Source) -> list[Problem]:
    """OlympiadBench, English, text only, open-ended (math-ai/olympiadbench); several golds are joined by commas.

    ``extra`` holds the columns of the row, among them ``unit``, ``answer_type``, ``is_multiple_answer`` and ``error`` (the tolerance).
    """
    return to_problems(
        load_source(source, hub="math-ai/olympiadbench", where="olympiadbench"),
        where="olympiadbench",
        question=lambda row: "\n".join(
            str(part) for part in (row.get("context"), row.get("question")) if part
        ),
        answer=lambda row: _joined(row.get("final_answer") or row.get("answer"), ", "),
        solution=lambda row: _joined(row.get("solution"), "\n\n", dollars=True),
        subject=lambda row: row.get("subfield"),
        identity=lambda row: row.get("id"),
    )


@dataset("gaokao")
def load_gaokao(source: Source) -> list[Problem]:
    """Gaokao 2023 in English (MARIO-Math-Reasoning/Gaokao2023-Math-En): sets, intervals, coordinates, equations."""
    rows = load_source(
        own_split(source, "train"), hub="MARIO-Math-Reasoning/Gaokao2023-Math-En", where="gaokao"
    )
    return to_problems(
        rows,
        where="gaokao",
        question=_question,
        answer=lambda row: without_dollars(str(row.get("answer") or "").strip().removesuffix("solution:")),
        identity=lambda row: row.get("source"),
        known_gaps=2,  # two published rows have an empty answer
    )


def _integer(value: Any) -> str:
    """Return an AIME answer as its digits; one published gold carries a degree sign."""
    return plain_number(re.sub(r"\s*\^\s*\{?\\circ\}?\s*$", "", plain_number(without_dollars(value))))


def _question(row: Row) -> Any:
    return row.get("question") or row.get("problem")


def _joined(value: Any, separator: str, *, dollars: bool = False) -> str:
    parts = value if isinstance(value, list) else [value]
    texts = [str(part).strip() if dollars else without_dollars(part) for part in parts if part is not None]
    return separator.join(text for text in texts if text)


def _flat(row: Row) -> Row:
    """Lift ``reward_model.ground_truth.{question,target}`` to the top."""
    truth = ground_truth(row)
    if not isinstance(truth, dict):
        return row
    more = row.get("extra_info")
    number = more.get("index") if isinstance(more, dict) else None
    return {**row, "question": truth.get("question"), "answer": truth.get("target"), "id": number}
