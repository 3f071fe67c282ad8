"""Rewards that were published with small models: answers in tags, numbers, steps, and the tags themselves."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import Field

from algorist.extensions.published_rewards.systems import (
    THINK_TAGS,
    WORKING_TAGS,
    accuracy,
    follows,
    plain_float,
)
from algorist.prompts import Tags
from algorist.rewards.base import reward
from algorist.rewards.build import RewardSet, build_rewards

REASONING_TAGS = Tags("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_HASH = re.compile(r"####\s*(-?\d+(?:,\d{3})*(?:\.\d+)?)")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_STEPS = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,", re.MULTILINE)


def tagged_or_hash(text: str, tags: Tags = REASONING_TAGS) -> str:
    """Return the first answer block, else the number after ``####``, else the whole text; stripped."""
    low = text.lower() if text.isascii() else text  # lower() may change the length of other texts
    start = low.find(tags.answer_open.lower())
    end = low.find(tags.answer_close.lower(), start) if start >= 0 else -1
    if end >= 0:
        return text[start + len(tags.answer_open) : end].strip()
    match = _HASH.search(text)
    return match[1] if match else text.strip()


@reward("correctness_numeric", low=0.0, high=1.0, source="OneShotGRPO")
def correctness_numeric(
    completion: str, *, gold: str, tags: Tags = REASONING_TAGS, tolerance: float = 1e-6
) -> float:
    """1 when answer and gold are close as floats (relative or absolute), or equal as texts if one is no number.

    Both sides are read in the same way: the answer block, else the number after ``####``, else the whole text; "1,080" is 1080.
    """
    answer, truth = tagged_or_hash(completion, tags), tagged_or_hash(gold, tags)
    left, right = (
        plain_float(text.replace(",", "") if _GROUPED.fullmatch(text) else text) for text in (answer, truth)
    )
    if left is None or right is None:
        return float(answer == truth)
    return float(math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance))


@reward("numeric", low=0.0, high=1.0, source="OneShotGRPO")
def numeric(completion: str, *, tags: Tags = REASONING_TAGS, finite_only: bool = True) -> float:
    """1 when the answer is a number that ``float`` reads, else 0; "1e3" is one, "1,000" is not.

    ``finite_only`` False also takes "nan" and "inf", as the original does.
    """
    answer = tagged_or_hash(completion, tags)
    if not finite_only and re.fullmatch(r"[-+]?(nan|inf|infinity)", answer, re.IGNORECASE):
        return 1.0
    return float(plain_float(answer) is not None)


def last_tagged(text: str, tags: Tags = REASONING_TAGS) -> str:
    """Return the text from the last opening answer tag to the next closing one; without tags the whole text."""
    return text.rpartition(tags.answer_open)[2].partition(tags.answer_close)[0].strip()


@reward("correctness_exact", low=0.0, high=2.0, aliases=("correctness",), source="the GSM8K gist")
def correctness_exact(completion: str, *, gold: str, tags: Tags = REASONING_TAGS) -> float:
    """2 when the last answer is the gold text, character by character, else 0 ("5.0" is not "5")."""
    return 2.0 * (last_tagged(completion, tags) == gold)


@reward("int", low=0.0, high=0.5, source="the GSM8K gist")
def integer(completion: str, *, tags: Tags = REASONING_TAGS) -> float:
    """0.5 when the last answer consists of digits only, else 0; no sign, no comma."""
    answer = last_tagged(completion, tags)
    return 0.5 * (answer.isascii() and answer.isdigit())


@reward("reasoning_steps", low=0.0, high=1.0, source="the R1-Zero reproduction")
def reasoning_steps(completion: str, *, steps: int = 3) -> float:
    """The number of marked steps, up to ``steps``, as a share of it.

    Marks are "Step 1:", a number with a dot, or a hyphen or an asterisk after a line's end, and "First,",
    "Second,", "Next,", "Finally,".
    """
    return min(1.0, len(_STEPS.findall(completion)) / max(1, steps))


def _ends(*, max_len: int, flipped: bool, **ends: float) -> tuple[float, float]:
    return min(ends.values()), max(ends.values())


@reward("cosine", low=-0.5, high=1.0, bounds=_ends, source="the R1-Zero reproduction")
def cosine(
    completion: str,
    *,
    gold: str,
    matcher: str = "symbolic",
    tags: Tags = THINK_TAGS,
    max_len: Annotated[int, Field(ge=1)] = 1000,
    correct_short: float = 1.0,
    correct_long: float = 0.8,
    wrong_short: float = -0.5,
    wrong_long: float = -0.1,
    flipped: bool = False,
) -> float:
    """A cosine from the short to the long value over ``max_len`` characters, by the ``accuracy`` of the completion.

    Short correct texts earn most, short wrong texts lose most; ``flipped``: long wrong texts.
    """
    if accuracy(completion, gold=gold, matcher=matcher, tags=tags) > 0.5:
        low, high = correct_long, correct_short
    else:
        low, high = (wrong_short, wrong_long) if flipped else (wrong_long, wrong_short)
    share = min(1.0, len(completion) / max_len)
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * share))


@reward("tag_fraction", low=0.0, high=1.0, source="OneShotGRPO")
def tag_fraction(completion: str, *, tags: Tags = REASONING_TAGS) -> float:
    """The share of the four tags that occur, whatever their order, number and case."""
    lowered = completion.lower()
    return sum(tag.lower() in lowered for tag in tags.all()) / 4


@reward("tag_count", low=0.0, high=1.0, source="the R1-Zero reproduction (open-r1)")
def tag_count(completion: str, *, tags: Tags = THINK_TAGS) -> float:
    """0.25 for each of the four tags that occurs exactly once."""
    return 0.25 * sum(completion.count(tag) == 1 for tag in tags.all())


@reward("exact_format", low=0.0, high=3.0, aliases=("match_format_exactly",), source="grpo-tests")
def exact_format(completion: str, *, tags: Tags = WORKING_TAGS, prefilled: bool = True) -> float:
    """3 when working and solution follow each other with nothing but whitespace around them, else 0.

    Each tag occurs exactly once, neither block is empty. A start tag that the prompt has opened (``prefilled``)
    counts as present, and may be repeated.
    """
    body = completion.strip()
    if prefilled and not body.startswith(tags.reasoning_open):
        body = tags.reasoning_open + body
    if any(body.count(tag) != 1 for tag in tags.all()):
        return 0.0
    between = follows(body, tags.reasoning_close, tags.answer_open)
    if between is None or not body.startswith(tags.reasoning_open) or not body.endswith(tags.answer_close):
        return 0.0
    working = body[len(tags.reasoning_open) : body.index(tags.reasoning_close)]
    solution = body[between : -len(tags.answer_close)]
    return 3.0 * bool(working.strip() and solution.strip())


@reward("approx_format", low=-3.0, high=1.5, aliases=("match_format_approximately",), source="grpo-tests")
def approx_format(completion: str, *, tags: Tags = WORKING_TAGS) -> float:
    """0.5 for each of end-of-working, solution-open and solution-close that occurs exactly once, else -1 for it."""
    counted = (tags.reasoning_close, tags.answer_open, tags.answer_close)
    return sum(0.5 if completion.count(tag) == 1 else -1.0 for tag in counted)


@reward("soft_format", low=0.0, high=0.5, source="the GSM8K gist")
def soft_format(completion: str, *, tags: Tags = REASONING_TAGS) -> float:
    """0.5 when the text starts with a reasoning block, then whitespace, then an answer block; text may follow."""
    if not completion.startswith(tags.reasoning_open):
        return 0.0
    end = follows(completion, tags.reasoning_close, tags.answer_open)
    return 0.5 * (end is not None and completion.find(tags.answer_close, end) >= 0)


@reward("strict_format", low=0.0, high=0.5, source="the GSM8K gist")
def strict_format(
    completion: str, *, tags: Tags = REASONING_TAGS, require_final_newline: bool = True
) -> float:
    """0.5 when the four tags occur once, in order, each on its own line, with a newline at the very end.

    ``require_final_newline`` False also takes a text that ends with the closing answer tag, as generated text does.
    """
    text = completion
    if not require_final_newline and not text.endswith("\n"):
        text += "\n"
    if any(text.count(tag) != 1 for tag in tags.all()) or not text.startswith(tags.reasoning_open + "\n"):
        return 0.0
    end = follows(text, f"\n{tags.reasoning_close}\n", f"{tags.answer_open}\n", gap="")
    return 0.5 * (end is not None and text[end:].endswith(f"\n{tags.answer_close}\n"))


@reward("xmlcount", low=-10.0, high=0.5, bounds=lambda floor, **_: (floor, 0.5), source="the GSM8K gist")
def xmlcount(
    completion: str,
    *,
    tags: Tags = REASONING_TAGS,
    penalty: Annotated[float, Field(ge=0)] = 0.001,
    floor: Annotated[float, Field(le=0)] = -10.0,
) -> float:
    """0.125 for each tag that occurs once with its newlines, less a penalty per character after the end.

    The penalty is taken twice: for what follows the closing tag's line, and for what follows the tag, less one character. A missing
    final newline costs ``penalty`` × the whole length. Values end at ``floor``.
    """
    value = 0.125 * (completion.count(f"{tags.reasoning_open}\n") == 1)
    value += 0.125 * (completion.count(f"\n{tags.reasoning_close}\n") == 1)
    if completion.count(f"\n{tags.answer_open}\n") == 1:
        value += 0.125 - penalty * len(completion.rpartition(f"\n{tags.answer_close}\n")[2])
    if completion.count(f"\n{tags.answer_close}") == 1:
        value += 0.125 - penalty * (len(completion.rpartition(f"\n{tags.answer_close}")[2]) - 1)
    return min(0.5, max(floor, value))


@reward("think_answer_format", low=0.0, high=1.0, aliases=("format",), source="the R1-Zero reproduction")
def think_answer_format(completion: str, *, tags: Tags = THINK_TAGS) -> float:
    """1 when the text starts with the think block, then whitespace, then an answer block that ends its line.

    Lines may follow it; text on the same line, or anything before the first tag, may not.
    """
    if not completion.startswith(tags.reasoning_open):
        return 0.0
    end = follows(completion, tags.reasoning_close, tags.answer_open)
    closed = end is not None and re.compile(rf"{re.escape(tags.answer_close)}(?=\n|\Z)").search(
        completion, end
    )
    return float(bool(closed))


DEFAULT_REWARDS = ("correctness_numeric", "numeric", "tag_fraction")
"""Names of the default rewards; a new one is registered in its theme's file and added here."""

DEFAULT_REWARD_WEIGHTS = [1.0, 0.1, 0.1]
"""Weights of the default rewards, in their order; the greatest total is 1.2."""


def default_reward_functions(prompt_format: str = "reasoning_answer") -> RewardSet:
    """Return the default rewards with their weights."""
    specs = [{"name": n, "weight": w} for n, w in zip(DEFAULT_REWARDS, DEFAULT_REWARD_WEIGHTS, strict=True)]
    return build_rewards(specs, prompt_format)
