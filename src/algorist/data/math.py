"""MATH (Hendrycks): competition problems with subject and level; the gold is the last ``\\boxed{}``."""

from __future__ import annotations

from algorist.data.base import Source, dataset
from algorist.data.columns import ground_truth, load_source, to_problems
from algorist.data.files import Row
from algorist.grading import last_boxed
from algorist.types import Problem


@dataset("math")
def load_math(source: Source) -> list[Problem]:
    """MATH or MATH-500, in the original columns, with an ``answer`` column, or in verl's nested layout."""
    rows = load_source(source, hub="EleutherAI/hendrycks_math", subset="algebra", where="math")
    return _problems(rows, "math", known_gaps=2)  # two training problems have an empty box


@dataset("math500")
def load_math500(source: Source) -> list[Problem]:
    """MATH-500 (HuggingFaceH4/MATH-500), a part of the MATH test split, with subject and level."""
    return _problems(load_source(source, hub="HuggingFaceH4/MATH-500", where="math500"), "math500")


def _problems(rows: list[Row], where: str, known_gaps: int = 0) -> list[Problem]:
    return to_problems(
        [_flat(row) for row in rows],
        where=where,
        question=lambda row: row.get("problem"),
        answer=lambda row: row.get("answer") or last_boxed(str(row.get("solution", ""))),
        solution=lambda row: row.get("solution"),
        subject=lambda row: row.get("subject") or row.get("type"),
        level=lambda row: str(row.get("level", "")).removeprefix("Level ").strip(),
        identity=lambda row: row.get("unique_id"),
        known_gaps=known_gaps,
    )


def _flat(row: Row) -> Row:
    """Lift ``reward_model.ground_truth.{question,solution,target}`` to the top."""
    truth = ground_truth(row)
    if isinstance(truth, dict):
        return {
            **row,
            "problem": truth.get("question"),
            "solution": truth.get("solution"),
            "answer": truth.get("target"),
        }
    return row
