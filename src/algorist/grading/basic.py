"""The first two rungs of the ladder: normalised strings and exact rationals."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from algorist.types import Grade, GradeReason, Parsed

_NUMBER = re.compile(r"([+-]?)(\d[\d,]*\.?\d*|\.\d+)(?:[eE]([+-]?\d{1,4}))?")
_FRACTION = re.compile(r"([+-]?\d+)\s*/\s*(\d+)")


@lru_cache(maxsize=65536)
def numeric_value(text: str) -> Fraction | None:
    """Return the exact value of a plain number, or None: integers, decimals, fractions, percent, currency, commas."""
    text = text.strip().replace("−", "-").strip("$ .").removesuffix("\\%").removesuffix("%").strip()
    if len(text) > 400:
        return None
    if match := _FRACTION.fullmatch(text):
        return Fraction(int(match[1]), int(match[2])) if int(match[2]) else None
    match = _NUMBER.fullmatch(text)
    if not match:
        return None
    digits = match[2]
    if "," in digits and not re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", digits):
        return None
    value = Fraction(digits.replace(",", "").rstrip(".") or "0") * Fraction(10) ** int(match[3] or 0)
    return -value if match[1] == "-" else value


def grade(
    answer: str | None,
    gold: str | Sequence[str],
    *,
    matcher: str = "symbolic",
    timeout_s: float = 1.0,
    memory_mb: int = 512,
) -> Grade:
    """Grade an extracted answer against a gold answer, or several."""
    began = time.perf_counter()
    golds = [gold] if isinstance(gold, str) else list(gold)
    reason: GradeReason = "no_answer" if not answer or not answer.strip() else "different"
    correct = False
    if answer and answer.strip():
        for one in golds:
            if answer.strip() == one.strip():
                correct, reason = True, "equal_string"
                break
            left, right = numeric_value(answer), numeric_value(one)
            if left is not None and left == right:
                correct, reason = True, "equal_number"
                break
    return Grade(correct, reason, answer, str(golds[0]), time.perf_counter() - began)


def grade_completion(
    text: str, gold: str | Sequence[str], *, parsed: Parsed | None = None, matcher: str = "symbolic"
) -> Grade:
    """Extract and grade."""
    if parsed is None:
        parsed = Parsed(None, text, False)
    if "several_answers" in parsed.flags:
        return Grade(False, "ambiguous", parsed.answer, str(gold))
    return grade(parsed.answer, gold, matcher=matcher)


def last_boxed(text: str) -> str | None:
    """Return the content of the last brace-balanced ``\\boxed{}``."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + 7 : position]
    return None
