"""Rewards for being right."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from algorist.grading import grade
from algorist.prompts import Tags
from algorist.rewards.base import reward
from algorist.rewards.extract import plain_float
from algorist.types import Parsed

REASONING_TAGS = Tags("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_HASH = re.compile(r"####\s*(-?\d+(?:\.\d+)?)")


@reward("correct", low=0.0, high=1.0, source="algorist.grading")
def correct(
    completion: str,
    *,
    parsed: Parsed,
    gold: str,
    matcher: str = "symbolic",
    problem: Mapping[str, Any] | None = None,
) -> float:
    """1 when the grader finds the parsed answer equal to the gold answer, else 0; the default reward.

    Two different answers are ambiguous and worth 0. Where the problem names a checker, that decides.
    """
    if "several_answers" in parsed.flags:
        return 0.0
    return float(grade(parsed.answer, gold, matcher=matcher, problem=problem).correct)


def tagged_or_hash(text: str, tags: Tags = REASONING_TAGS) -> str:
    """Return the first answer block, else the number behind ``####``, else the whole text; stripped (S0.32)."""
    low = text.lower() if text.isascii() else text  # lower() may change the length of other texts
    start = low.find(tags.answer_open.lower())
    end = low.find(tags.answer_close.lower(), start) if start >= 0 else -1
    if end >= 0:
        return text[start + len(tags.answer_open) : end].strip()
    match = _HASH.search(text)
    return match[1] if match else text.strip()


@reward("correctness_numeric", low=0.0, high=1.0, source="S0.29, S0.33")
def correctness_numeric(
    completion: str, *, gold: str, tags: Tags = REASONING_TAGS, tolerance: float = 1e-6
) -> float:
    """1 when answer and gold are close as floats (relative or absolute), or equal as texts if one is no number.

    Both sides are read in the same way: the answer block, else the number behind ``####``, else the whole text.
    """
    answer, truth = tagged_or_hash(completion, tags), tagged_or_hash(gold, tags)
    left, right = plain_float(answer), plain_float(truth)
    if left is None or right is None:
        return float(answer == truth)
    return float(math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance))


@reward("numeric", low=0.0, high=1.0, source="S0.30")
def numeric(completion: str, *, tags: Tags = REASONING_TAGS, finite_only: bool = True) -> float:
    """1 when the answer is a number that ``float`` reads, else 0; "1e3" is one, "1,000" is not.

    ``finite_only`` False also takes "nan" and "inf", as the original does.
    """
    answer = tagged_or_hash(completion, tags)
    if not finite_only and re.fullmatch(r"[-+]?(nan|inf|infinity)", answer, re.IGNORECASE):
        return 1.0
    return float(plain_float(answer) is not None)


def last_tagged(text: str, tags: Tags = REASONING_TAGS) -> str:
    """Return what follows the last opening answer tag, up to the next closing one; without tags the text (S2.6)."""
    return text.rpartition(tags.answer_open)[2].partition(tags.answer_close)[0].strip()


@reward("correctness_exact", low=0.0, high=2.0, aliases=("correctness",), source="S2.7")
def correctness_exact(completion: str, *, gold: str, tags: Tags = REASONING_TAGS) -> float:
    """2 when the last answer is the gold text, character by character, else 0 ("5.0" is not "5")."""
    return 2.0 * (last_tagged(completion, tags) == gold)


@reward("int", low=0.0, high=0.5, source="S2.8")
def integer(completion: str, *, tags: Tags = REASONING_TAGS) -> float:
    """0.5 when the last answer consists of digits only, else 0; no sign, no comma."""
    answer = last_tagged(completion, tags)
    return 0.5 * (answer.isascii() and answer.isdigit())
