"""The reference systems' own rules: CS336's assignment 5, DAPO, open-r1; and how rules read blocks, numbers and formulas in a text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from algorist.prompts import Tags
from algorist.rewards.base import reward
from algorist_grader import gold_texts, grade, last_boxed, why_unreadable
from algorist_grader.hendrycks import plain_form
from algorist_grader.markers import after_reasoning, find_boxes, is_denied

_MATH = re.compile(r"\$([^$]+)\$")
_ALTERNATIVES = re.compile(
    r"[,;/]|,?\s*(?:or|and|maybe|not|and/or)(?:\s+(?:maybe|perhaps|not))?", re.IGNORECASE
)
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def first_block(text: str, opening: str, closing: str) -> str | None:
    """Return the text between the first ``opening`` and the next ``closing``, or None. Linear time."""
    start = text.find(opening)
    end = text.find(closing, start + len(opening)) if start >= 0 else -1
    return text[start + len(opening) : end] if end >= 0 else None


def follows(text: str, first: str, second: str, *, gap: str = r"\s*") -> int | None:
    """Return the position after the first ``first`` + gap + ``second``, or None."""
    match = re.search(f"{re.escape(first)}{gap}{re.escape(second)}", text)
    return match.end() if match else None


def plain_float(text: str) -> float | None:
    """Return the finite float that ``text`` writes, or None: no commas, no currency, no "nan", no "inf"."""
    if "_" in text:  # float("1_000") is a Python literal, not a way to write numbers
        return None
    try:
        value = float(text.strip())
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def numbers_in(text: str) -> list[str]:
    """Return the numbers in a text as written, without trailing commas."""
    return [match.rstrip(",") for match in _NUMBER.findall(text)]


def formula_in(text: str) -> str:
    """Return the last box, else the last ``$…$``, else the whole text, stripped; one that is taken back, or one of two, is not taken alone."""
    boxes, unclosed = find_boxes(text)
    if boxes and not unclosed:
        box = boxes[-1]
        return text.strip() if is_denied(text, box.command, box.end) else text[box.start : box.end].strip()
    formulas = list(_MATH.finditer(text))
    if not formulas or is_denied(text, formulas[-1].start()):
        return text.strip()
    between = text[formulas[-2].end() : formulas[-1].start()] if len(formulas) > 1 else ""
    alternatives = _ALTERNATIVES.fullmatch(between.strip()) if between.strip() else None
    return text.strip() if alternatives else formulas[-1][1].strip()


THINK_TAGS = Tags("<think>", "</think>", "<answer>", "</answer>")
_LATEX = re.compile(r"[\\$]")


@reward("accuracy", low=0.0, high=1.0, source="the R1-Zero reproduction")
def accuracy(
    completion: str,
    *,
    gold: str,
    matcher: str = "symbolic",
    tags: Tags = THINK_TAGS,
    neutral: Annotated[float, Field(ge=0, le=1)] = 0.5,
    latex_gold_only: bool = False,
) -> float:
    """1 or 0 by the grader on the first answer block after the reasoning (all of that without one); ``neutral`` for unreadable gold.

    A box or ``$…$`` inside the answer is what counts. ``latex_gold_only``: gold without LaTeX is unreadable, as in the original.
    """
    if why_unreadable(formula_in(gold)) or (latex_gold_only and not _LATEX.search(gold)):
        return neutral
    body = after_reasoning(completion) or ""
    block = first_block(body, tags.answer_open, tags.answer_close)
    said = body if block is None else block
    graded = grade(formula_in(said), formula_in(gold), matcher=matcher)
    return neutral if graded.reason == "unparseable_gold" else float(graded.correct)


@reward("accuracy_last_number", low=0.0, high=1.0, source="the R1-Zero reproduction")
def accuracy_last_number(completion: str, *, gold: str, tags: Tags = THINK_TAGS) -> float:
    """1 when the last numbers of the answer block and of the gold agree within 1e-6, else when the texts do.

    A completion without an answer block gets 0.
    """
    block = first_block(completion, tags.answer_open, tags.answer_close)
    if block is None:
        return 0.0
    left, right = numbers_in(block), numbers_in(gold)
    if left and right:
        return float(abs(float(left[-1].replace(",", "")) - float(right[-1].replace(",", ""))) <= 1e-6)
    return float(block.strip().lower() == gold.strip().lower())


WORKING_TAGS = Tags("<start_working_out>", "<end_working_out>", "<SOLUTION>", "</SOLUTION>")


Variant = Literal["bounded", "origin", "notebook"]
"""``bounded`` keeps the documented range of the system; ``origin`` and ``notebook`` are what its code and its model did."""
ANSWER_TABLES = {
    "bounded": (5.0, 3.5, 2.0, 1.5, -2.0, -2.0, -2.0),
    "origin": (5.0, 3.5, 2.0, 1.5, -2.5, -2.5, -2.0),
    "notebook": (5.0, 3.5, 2.0, 1.5, -2.5, -4.5, -2.0),
}
"""Scores of ``check_answer``: equal, equal but for spaces, within 10 and 20 percent, wrong, not a number, missing."""
NUMBER_TABLES = {
    "bounded": (3.0, 2.5, 1.5, -1.5, -1.5, -1.5),
    "origin": (4.0, 2.5, 1.5, -2.0, -2.0, -1.5),
    "notebook": (3.5, -1.5, -1.5, -1.5, 0.0, -2.5),
}
"""Scores of ``check_numbers``: equal, within 10 and 20 percent, wrong, not a number, missing."""


def _range(tables: Mapping[str, Sequence[float]]) -> Callable[..., tuple[float, float]]:
    return lambda variant: (min(tables[variant]), max(tables[variant]))


def _band(value: float, truth: float, paid: Sequence[float]) -> float:
    """Pick a score for equal, within 10 percent, within 20 or wrong; with truth 0 only 0 itself is right."""
    if truth == 0:
        return paid[0] if value == 0 else paid[3]
    ratio = value / truth
    if 0.9 <= ratio <= 1.1:
        return paid[1]
    return paid[2] if 0.8 <= ratio <= 1.2 else paid[3]


@reward("check_answer", low=-2.0, high=5.0, bounds=_range(ANSWER_TABLES), source="grpo-tests")
def check_answer(
    completion: str, *, gold: str, tags: Tags = WORKING_TAGS, variant: Variant = "bounded"
) -> float:
    """5 for the gold text, 3.5 when only spaces differ, 2 or 1.5 for numbers within 10 or 20 percent, else -2.

    Variants "origin" (wrong -2.5) and "notebook" (wrong -2.5, no number -4.5; surrounding whitespace costs 1.5) leave the range.
    """
    exact, spaces, *bands, not_a_number, missing = ANSWER_TABLES[variant]
    block = first_block(completion, tags.answer_open, tags.answer_close)
    if block is None:
        return missing
    truth = gold.strip()
    if (block if variant == "notebook" else block.strip()) == truth:
        return exact
    squeezed = block.strip() if variant == "notebook" else "".join(block.split())
    if squeezed == (truth if variant == "notebook" else "".join(truth.split())):
        return spaces
    value, expected = plain_float(block), plain_float(truth)
    if value is None or expected is None:
        return not_a_number
    return _band(value, expected, (exact, *bands))


@reward("check_numbers", low=-1.5, high=3.0, bounds=_range(NUMBER_TABLES), source="grpo-tests")
def check_numbers(
    completion: str, *, gold: str, tags: Tags = WORKING_TAGS, variant: Variant = "bounded"
) -> float:
    """3 when the first number of the solution is the gold number, 2.5 or 1.5 within 10 or 20 percent, else -1.5.

    Variants: "origin" (4, wrong -2) and "notebook" (3.5, no bands, commas dropped, none -2.5, gold no number 0).
    """
    equal, *bands, not_a_number, missing = NUMBER_TABLES[variant]
    block = first_block(completion, tags.answer_open, tags.answer_close)
    numbers = numbers_in(block or "")
    if not numbers:
        return missing
    first, truth = numbers[0], gold.strip()
    if variant == "notebook":
        first, truth = first.replace(",", ""), truth.replace(",", "")
    value, expected = plain_float(first), plain_float(truth)
    if value is None or expected is None:
        return not_a_number
    if abs(value - expected) <= 1e-6:
        return equal
    return _band(value, expected, (equal, *bands))


Truth = str | int | float | Sequence[str | int | float]
_PLAIN_FRACTION = re.compile(
    r"\s*(-?)\s*(?:(\d+)\s*/\s*(\d+)|\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d)))\s*"
)
_VARIABLE = re.compile(r"\d[a-zA-Z](?:\^\{?\d+\}?)?$|\d[a-zA-Z]\d")
"""One letter at a digit (``3x``, ``162x^4``, ``5C2``): no unit that the original's normalisers drop."""


def _same_form(answer: str, truth: str) -> bool:
    """Return False for an unreduced fraction, or for a non-integer writing of an integer.

    Both are looked at without what the original's normalisers drop: text wrappers, units, degrees, percent, ``x =``.
    """
    if _VARIABLE.search("".join(truth.split())):
        return True
    if re.search(r"\d[a-zA-Z]\d", answer):
        return False
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
    """Grade a response to the ``r1_zero`` prompt.

    Args:
        response: The text after the opening think tag that the prompt ends with.
        ground_truth: The gold answer, or several of which one must match; a boxed one is unwrapped.
        fast: Keep the original's strictness about form: an unreduced fraction, or "8/2" for 4, is wrong. False
            accepts every equal value.
        gap: Regular expression of what comes between the closing think tag and the opening answer tag.
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
    """Grade a response whose answer is its last box; the same triples as ``r1_zero_reward_fn``.

    Unlike the original's, a box inside ``<think>`` is no answer, nor is one that is taken back ("not" before it).
    """
    body = after_reasoning(response) or ""
    if last_boxed(body) is None:
        return {"format_reward": 0.0, "answer_reward": 0.0, "reward": 0.0}
    return _graded(_box(body), ground_truth, fast=fast, matcher=matcher)


@reward("r1_zero", low=0.0, high=1.0, source="Policy gradients on MATH")
def r1_zero(
    completion: str, *, gold: str, matcher: str = "symbolic", fast: bool = True, any_gap: bool = False
) -> float:
    """1 when ``</think> <answer>…</answer>`` follows with exactly one space and the answer is right, else 0.

    ``any_gap`` also takes other whitespace between the two tags (``think_answer`` completions).
    """
    gap = r"\s*" if any_gap else " "
    return r1_zero_reward_fn(completion, gold, fast, gap=gap, matcher=matcher)["reward"]


@reward("question_only", low=0.0, high=1.0, source="Policy gradients on MATH")
def question_only(completion: str, *, gold: str, matcher: str = "symbolic", fast: bool = True) -> float:
    """1 when the last box holds the right answer, else 0."""
    return question_only_reward_fn(completion, gold, fast, matcher=matcher)["reward"]
