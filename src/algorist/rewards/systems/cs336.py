"""The rules of CS336's assignment 5: ``r1_zero_reward_fn`` and ``question_only_reward_fn``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from algorist.grading import gold_texts, grade, last_boxed
from algorist.grading.hendrycks import plain_form
from algorist.grading.markers import after_reasoning, find_boxes, is_denied
from algorist.rewards.base import reward
from algorist.rewards.extract import follows, formula_in, plain_float

Truth = str | int | float | Sequence[str | int | float]
_PLAIN_FRACTION = re.compile(r"\s*(-?)\s*(?:(\d+)\s*/\s*(\d+)|\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\})\s*")


def _same_form(answer: str, truth: str) -> bool:
    """Return False for an unreduced fraction, or for a non-integer writing of an integer (S3.31).

    Both are looked at without what the original's normalisers drop: text wrappers, units, degrees, percent, ``x =``.
    """
    answer, truth = plain_form(answer), plain_form(truth)
    left, right = _PLAIN_FRACTION.fullmatch(answer), _PLAIN_FRACTION.fullmatch(truth)
    if left and right:
        return [g for g in left.groups() if g is not None] == [g for g in right.groups() if g is not None]
    number = plain_float(truth)
    if number is None or number != round(number):
        return True
    value = plain_float(answer)
    return value is not None and abs(value - round(value)) <= 1e-7


def _graded(answer: str | None, ground_truth: Truth, *, fast: bool, matcher: str) -> dict[str, float]:
    right = answer is not None and any(
        grade(answer, formula, matcher=matcher).correct and (not fast or _same_form(answer, formula))
        for formula in map(formula_in, gold_texts(ground_truth))
    )
    return {"format_reward": 1.0, "answer_reward": float(right), "reward": float(right)}


def r1_zero_reward_fn(
    response: str, ground_truth: Truth, fast: bool = True, *, gap: str = " ", matcher: str = "symbolic"
) -> dict[str, float]:
    """Grade a response to the ``r1_zero`` prompt (S3.27–S3.31).

    Args:
        response: The text after the opening think tag that the prompt ends with.
        ground_truth: The gold answer, or several of which one must match; a boxed one is unwrapped.
        fast: Keep the original's strictness about form: an unreduced fraction, or "8/2" for 4, is wrong. False
            accepts every equal value.
        gap: Regular expression of what stands between the closing think tag and the opening answer tag.
        matcher: How answers are compared.

    Returns:
        ``format_reward``, ``answer_reward`` and ``reward``, each 0 or 1. Unformatted is 0, 0, 0; formatted and wrong
        1, 0, 0; formatted and right 1, 1, 1.
    """
    end = follows(response, "</think>", "<answer>", gap=gap)
    if end is None or "</answer>" not in response:
        return {"format_reward": 0.0, "answer_reward": 0.0, "reward": 0.0}
    block = response.rpartition("<answer>")[2].replace("</answer>", "").strip()
    answer = _box(block) if "\\boxed" in block else block  # None: a box that nobody can read
    return _graded(answer, ground_truth, fast=fast, matcher=matcher)


def _box(text: str) -> str | None:
    """Return the content of the last box; None where it is not closed, or taken back ("not" before it)."""
    boxes, _ = find_boxes(text)
    return None if not boxes or is_denied(text, boxes[-1].command, boxes[-1].end) else last_boxed(text)


def question_only_reward_fn(
    response: str, ground_truth: Truth, fast: bool = True, *, matcher: str = "symbolic"
) -> dict[str, float]:
    """Grade a response whose answer is its last box (S3.30); the same triples as ``r1_zero_reward_fn``.

    Unlike the original's, a box inside ``<think>`` is no answer, nor is one that is taken back ("not" before it).
    """
    body = after_reasoning(response) or ""
    if last_boxed(body) is None:
        return {"format_reward": 0.0, "answer_reward": 0.0, "reward": 0.0}
    return _graded(_box(body), ground_truth, fast=fast, matcher=matcher)


@reward("r1_zero", low=0.0, high=1.0, source="S3.27–S3.31")
def r1_zero(
    completion: str, *, gold: str, matcher: str = "symbolic", fast: bool = True, any_gap: bool = False
) -> float:
    """1 when ``</think> <answer>…</answer>`` stands there with exactly one space and the answer is right, else 0.

    ``any_gap`` also takes other whitespace between the two tags (``think_answer`` completions).
    """
    gap = r"\s*" if any_gap else " "
    return r1_zero_reward_fn(completion, gold, fast, gap=gap, matcher=matcher)["reward"]


@reward("question_only", low=0.0, high=1.0, source="S3.30")
def question_only(completion: str, *, gold: str, matcher: str = "symbolic", fast: bool = True) -> float:
    """1 when the last box holds the right answer, else 0."""
    return question_only_reward_fn(completion, gold, fast, matcher=matcher)["reward"]
