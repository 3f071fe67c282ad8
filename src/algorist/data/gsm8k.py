"""GSM8K: grade-school word problems; the gold answer stands behind ``####`` in the worked solution."""

from __future__ import annotations

import re

from algorist.data.base import Source, dataset
from algorist.data.columns import load_source, to_problems
from algorist.grading.markers import hash_answers
from algorist.types import Problem


def extract_hash_answer(text: str) -> str:
    """Return the rest of the line behind ``####``, stripped; without a marker the whole text, stripped."""
    if "####" not in text:
        return text.strip()
    found = hash_answers(text)
    return found[0] if found else ""


def clean_solution(text: str) -> str:
    """Return the worked steps without calculator annotations ``<<…>>`` and without the answer line."""
    return re.sub(r"<<[^<>]*>>", "", text.partition("####")[0]).strip()


@dataset("gsm8k")
def load_gsm8k(source: Source) -> list[Problem]:
    """GSM8K from the hub (openai/gsm8k, main) or local files with question and answer columns."""
    rows = load_source(source, hub="openai/gsm8k", subset="main", where="gsm8k")
    return to_problems(
        rows,
        where="gsm8k",
        question=lambda row: row.get("question"),
        answer=lambda row: _number(row.get("answer")),
        solution=lambda row: clean_solution(str(row.get("answer", ""))),
    )


def _number(answer: object) -> str:
    if not isinstance(answer, str) or "####" not in answer:
        return ""
    return extract_hash_answer(answer).replace(",", "").replace("$", "")
