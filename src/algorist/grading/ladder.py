"""The matcher ``symbolic``: strings, exact numbers, structure, quick points, and only then a worker process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from algorist.grading.compare import canonical, equal
from algorist.grading.grammar import parse
from algorist.grading.numeric import numeric_value
from algorist.grading.probe import quick
from algorist.grading.text import MAX_ANSWER, clean, tight
from algorist.grading.tree import Node, Unreadable, num
from algorist.grading.units import number_in_words
from algorist.grading.workers import pool_for
from algorist.types import GradeReason

Verdict = tuple[bool, GradeReason]

MAX_GOLD = 2_000
"""Longer gold answers are unreadable (characters)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a slow decision may cost, and a relative tolerance where the dataset declares one."""

    timeout_s: float = 1.0
    memory_mb: int = 512
    tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """An answer as it was read: one spelling, the tree if the grammar knows it, else why not."""

    text: str
    tree: Node | None
    why: str = ""
    code: str = ""


def read(text: str) -> Read:
    """Read an answer or a gold answer; nothing is raised."""
    return _read(text) if len(text) <= 300 else _read.__wrapped__(text)


@lru_cache(maxsize=16_384)
def _read(text: str) -> Read:
    if len(text) > MAX_ANSWER:
        return Read("", None, f"longer than {MAX_ANSWER} characters", "too_large")
    cleaned = clean(text)
    if not cleaned:
        return Read("", None, "empty" if cleaned is not None else "control characters", "unparseable")
    value = number_in_words(cleaned) if cleaned[0].isalpha() else None
    if value is not None:
        return Read(cleaned, num(value))
    try:
        return Read(cleaned, canonical(parse(cleaned)))
    except Unreadable as error:
        return Read(cleaned, None, str(error), error.code)
    except RecursionError:
        return Read(cleaned, None, "nested too deep", "too_large")


def _balanced(text: str) -> bool:
    bare = re.sub(r"\\.", "", text)
    return bare.count("{") == bare.count("}")


def why_unreadable(gold: str) -> str:
    """Return why a gold answer cannot be graded against, or an empty string; what is only text is compared as text."""
    if len(gold) > MAX_GOLD:
        return f"longer than {MAX_GOLD} characters"
    if numeric_value(gold) is not None:
        return ""
    found = read(gold)
    if found.tree is not None:
        return ""
    if not found.text:
        return found.why
    if not re.search(r"[0-9A-Za-z]", found.text):
        return "no letter and no digit"
    return "" if _balanced(found.text) else "braces that do not match"


def is_text_only(gold: str) -> bool:
    """Say whether a gold answer can only be compared as a string, because the grammar does not know it."""
    return numeric_value(gold) is None and read(gold).tree is None


def _close(a: Fraction, b: Fraction, tolerance: float | None) -> bool:
    return a == b or (tolerance is not None and abs(a - b) <= Fraction(tolerance) * abs(b))


def symbolic(answer: str, gold: str, limits: Limits, *, slow: bool = True) -> Verdict:
    """Return whether an answer is the gold answer, and why."""
    plain = "%" not in answer and "%" not in gold
    if plain:
        left, right = numeric_value(answer), numeric_value(gold)
        if left is not None and right is not None:
            same = _close(left, right, limits.tolerance)
            return (
                same,
                "equal_number"
                if same and answer.strip() != gold.strip()
                else "equal_string"
                if same
                else "different",
            )
    if why_unreadable(gold):
        return False, "unparseable_gold"
    if len(answer) > MAX_ANSWER:
        return False, "unparseable_answer"
    told, truth = read(answer), read(gold)
    if not told.text:
        return False, "unparseable_answer"
    if tight(told.text) == tight(truth.text):
        return True, "equal_string"
    if told.tree is None:
        return False, "ambiguous" if told.code == "ambiguous" else "unparseable_answer"
    if truth.tree is None:
        return False, "different"
    return _trees(told, truth, limits, slow=slow)


def _trees(told: Read, truth: Read, limits: Limits, *, slow: bool) -> Verdict:
    assert told.tree is not None and truth.tree is not None

    def scalar(a: Node, b: Node) -> bool | None:
        if limits.tolerance is not None and a[0] == b[0] == "num":
            return _close(a[1], b[1], limits.tolerance)
        return quick(a, b)

    try:
        same = equal(told.tree, truth.tree, scalar)
    except Unreadable:
        return False, "unparseable_answer"
    except RecursionError:
        return False, "unparseable_answer"
    if same is not None:
        if same:
            return True, "equal_number" if told.tree[0] == "num" else "equal_symbolic"
        several = told.tree[0] == "list" and truth.tree[0] not in ("list", "set", "union", "named")
        return False, "ambiguous" if several else "different"
    if not slow:
        return False, "unparseable_answer"
    found = pool_for("symbolic", limits.timeout_s, limits.memory_mb).ask(told.text, truth.text)
    if found.error:
        return False, found.error if found.error in ("timeout", "memory") else "crashed"  # type: ignore[return-value]
    if found.told is None:
        return False, "unparseable_answer"
    return found.told, "equal_symbolic" if found.told else "different"
