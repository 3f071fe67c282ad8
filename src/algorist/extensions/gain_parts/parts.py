"""Reasons of wrong answers, and the part of a gain in accuracy that each of them has.

A problem that turned right counts for the reason why it was wrong before, one that turned wrong against the reason why it is wrong
now. So the parts add up to the gain, problem by problem, and each has the interval of a paired difference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from algorist.errors import DataError
from algorist.evaluation.doors import GainPart
from algorist.evaluation.estimators import paired_share_difference
from algorist.extensions.toolbox.calculator import CURRENCIES, NotArithmetic, as_text, last_sum, value_of
from algorist_grader import grade

FORM = {
    "format": "the right answer, not where the format asks for it",
    "cut off": "no answer before the length limit",
    "extraction": "the right answer is worked out, another one is given",
}
MATHEMATICS = {
    "arithmetic": "a wrong sum: with right ones the answer is right",
    "operations": "other operations or numbers than the right answer needs, or no sum that can be read",
}
MEANING = FORM | MATHEMATICS
_RESULT = re.compile(rf"\s*[{CURRENCIES}]?\s*(-?\d+(?:,\d{{3}}(?!\d))*(?:\.\d+)?)(?![\d.]*\d)")
_NUMBER = re.compile(r"\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")
_SIGNS = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\$": "$", "**": "", "\\,": ""}


def parts_of(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> dict[str, GainPart]:
    """Split the difference of two evaluations' greedy accuracy into its reasons, with ``form`` and ``mathematics`` in all.

    Args:
        before: Rows of the first evaluation.
        after: Those of the second, of the same problems.

    Raises:
        DataError: One of the two has no greedy answers.
    """
    first, second = ({row["problem_id"]: row for row in rows if row["greedy"]} for rows in (before, after))
    if not first or not second:
        raise DataError("parts of a gain are those of greedy answers; one of the two evaluations has none")
    reasons = [(reason(row), reason(second[name])) for name, row in first.items()]
    groups = {name: {name} for name in MEANING} | {"form": {*FORM}, "mathematics": {*MATHEMATICS}}
    return {name: _part(reasons, group) for name, group in groups.items()}


def _part(reasons: Sequence[tuple[str, str]], group: set[str]) -> GainPart:
    """Return the part of a group of reasons.

    Args:
        reasons: Of each problem before and after; an empty string for a right answer.
        group: Reasons that count.
    """
    up = sum(was in group and not now for was, now in reasons)
    down = sum(not was and now in group for was, now in reasons)
    first, second = (sum(pair[i] in group for pair in reasons) / len(reasons) for i in (0, 1))
    return GainPart(first, second, paired_share_difference(up, down, len(reasons)), total=len(group) > 1)


def reason(row: Mapping[str, Any]) -> str:
    """Name why an answer is wrong, by the first of ``MEANING`` that fits; an empty string for a right one."""
    if row["correct"]:
        return ""
    if row.get("lenient"):
        return "format"
    if row.get("truncated") and not row.get("extracted"):
        return "cut off"
    sums = worked_out(str(row.get("completion") or ""))
    if not sums:
        return "operations"
    stated, right = sums[-1]
    gold = str(row.get("gold") or "")
    if grade(as_text(stated), gold).correct:
        return "extraction"
    return "arithmetic" if stated != right and grade(as_text(right), gold).correct else "operations"


def worked_out(text: str) -> list[tuple[Fraction, Fraction]]:
    """Return for each sum of a text the result that it states and the one that it has with right results before it.

    A result that is rounded to the decimals that it is written with counts as right.
    """
    for written, meant in _SIGNS.items():
        text = text.replace(written, meant)
    sums: list[tuple[Fraction, Fraction]] = []
    corrected: dict[Fraction, Fraction] = {}
    for sign in re.finditer("=", text):
        expression, result = last_sum(text[: sign.start()]), _RESULT.match(text, sign.end())
        if expression is None or result is None:
            continue
        stated = Fraction(result[1].replace(",", ""))
        try:
            right = value_of(_NUMBER.sub(lambda number: _replaced(number[0], corrected), expression))
        except NotArithmetic:
            continue
        decimals = len(result[1].partition(".")[2])
        if decimals and abs(right - stated) <= Fraction(1, 2 * 10**decimals):
            right = stated
        if right != stated:
            corrected[stated] = right
        else:
            corrected.pop(stated, None)
        sums.append((stated, right))
    return sums


def _replaced(number: str, corrected: Mapping[Fraction, Fraction]) -> str:
    value = Fraction(number.replace(",", ""))
    right = corrected.get(value, value)
    return number if right == value else f"({right})"
