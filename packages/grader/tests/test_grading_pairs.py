"""The labelled pairs: every decidable one is decided right, and the verdict does not depend on the order."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from algorist_grader import grade, grade_completion
from pairs import FILE, pairs

ALL = list(pairs())
CATEGORIES = sorted({p[0] for p in ALL})


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_pair(category: str) -> None:
    wrong = []
    for found, sign, gold, answer in ALL:
        if found == category and sign != "?":
            verdict = grade(answer, gold)
            if verdict.correct != (sign == "="):
                wrong.append((sign, gold, answer, verdict.reason))
    assert not wrong


def test_there_are_enough_and_none_twice() -> None:
    judged = [p[1:] for p in ALL if p[1] != "?"]
    assert len(judged) >= 1000
    signs = Counter(p[0] for p in judged)
    assert min(signs.values()) > 400
    labels: dict[tuple[str, str], set[str]] = {}
    for sign, gold, answer in judged:
        labels.setdefault((gold, answer), set()).add(sign)
    assert [pair for pair, found in labels.items() if len(found) > 1] == []


@pytest.mark.parametrize(
    "category",
    [c for c in CATEGORIES if c not in ("hedges and comments", "nothing", "choices with their value")],
)
def test_symmetric(category: str) -> None:
    """Gold and answer may change places, except where the answer is not readable as a gold answer at all."""
    odd = []
    for found, sign, gold, answer in ALL:
        if found == category and sign != "?":
            there, back = grade(answer, gold), grade(gold, answer)
            if there.correct != back.correct and back.reason != "unparseable_gold":
                odd.append((gold, answer, there.reason, back.reason))
    assert not odd


def test_answers_of_an_attack() -> None:
    """Answers by another hand, unfair ones that were paid and fair ones that were not; no unfair one is paid today."""
    rows = [
        json.loads(line)
        for line in FILE.with_name("grading_cases.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(rows) == 116 and all(row["fair"] for row in rows if "unpaid_because" in row)
    wrong = []
    for row in rows:
        verdict = grade(row["answer"], row["gold"])
        if verdict.correct != (row["fair"] and "unpaid_because" not in row):
            wrong.append((row, verdict.reason))
    assert wrong == []


def test_answers_of_public_reports() -> None:
    """506 answers after bug reports of other graders; none that is wrong is paid, and those unpaid have their reason."""
    lines = FILE.with_name("public_reports.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 506 and sum("unpaid_because" in row for row in rows) <= 5
    wrong = []
    for row in rows:
        judge = grade if row["style"] == "plain" else grade_completion
        verdict = judge(row["completion"], row["gold"])
        if verdict.correct != (row["expected"] and "unpaid_because" not in row):
            wrong.append((row, verdict.reason))
    assert wrong == []
