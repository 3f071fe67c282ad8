"""Rewards for keeping to the format."""

from __future__ import annotations

import re

from algorist.errors import ConfigError
from algorist.prompts import Tags
from algorist.rewards.base import reward
from algorist.rewards.basic import REASONING_TAGS
from algorist.rewards.extract import follows
from algorist.rewards.systems.dapo import WORKING_TAGS
from algorist.rewards.systems.open_r1 import THINK_TAGS
from algorist.types import Parsed


@reward("well_formed", low=0.0, high=1.0, source="algorist.prompts")
def well_formed(completion: str, *, parsed: Parsed) -> float:
    """1 when the completion follows its prompt format exactly, else 0; the default format reward."""
    return float(parsed.well_formed)


@reward("tag_fraction", low=0.0, high=1.0, source="S0.31")
def tag_fraction(completion: str, *, tags: Tags = REASONING_TAGS) -> float:
    """The share of the four tags that occur, whatever their order, number and case."""
    lowered = completion.lower()
    return sum(tag.lower() in lowered for tag in tags.all()) / 4


@reward("tag_count", low=0.0, high=1.0, source="S4.24 (open-r1)")
def tag_count(completion: str, *, tags: Tags = THINK_TAGS) -> float:
    """0.25 for each of the four tags that occurs exactly once."""
    return 0.25 * sum(completion.count(tag) == 1 for tag in tags.all())


@reward("exact_format", low=0.0, high=3.0, aliases=("match_format_exactly",), source="S1.39, S1.45")
def exact_format(completion: str, *, tags: Tags = WORKING_TAGS, prefilled: bool = True) -> float:
    """3 when working and solution follow each other with nothing but whitespace around them, else 0.

    Each tag stands exactly once, neither block is empty. A start tag that the prompt has opened (``prefilled``)
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


@reward("approx_format", low=-3.0, high=1.5, aliases=("match_format_approximately",), source="S1.40")
def approx_format(completion: str, *, tags: Tags = WORKING_TAGS) -> float:
    """0.5 for each of end-of-working, solution-open and solution-close that occurs exactly once, else -1 for it."""
    counted = (tags.reasoning_close, tags.answer_open, tags.answer_close)
    return sum(0.5 if completion.count(tag) == 1 else -1.0 for tag in counted)


@reward("soft_format", low=0.0, high=0.5, source="S2.10")
def soft_format(completion: str, *, tags: Tags = REASONING_TAGS) -> float:
    """0.5 when the text starts with a reasoning block, then whitespace, then an answer block; text may follow."""
    if not completion.startswith(tags.reasoning_open):
        return 0.0
    end = follows(completion, tags.reasoning_close, tags.answer_open)
    return 0.5 * (end is not None and completion.find(tags.answer_close, end) >= 0)


@reward("strict_format", low=0.0, high=0.5, source="S2.9")
def strict_format(
    completion: str, *, tags: Tags = REASONING_TAGS, require_final_newline: bool = True
) -> float:
    """0.5 when the four tags stand once, in order, each on its own line, with a newline at the very end.

    ``require_final_newline`` False also takes a text that ends with the closing answer tag, as generated text does.
    """
    text = completion
    if not require_final_newline and not text.endswith("\n"):
        text += "\n"
    if any(text.count(tag) != 1 for tag in tags.all()) or not text.startswith(tags.reasoning_open + "\n"):
        return 0.0
    end = follows(text, f"\n{tags.reasoning_close}\n", f"{tags.answer_open}\n", gap="")
    return 0.5 * (end is not None and text[end:].endswith(f"\n{tags.answer_close}\n"))


def _xmlcount_bounds(*, penalty: float, floor: float) -> tuple[float, float]:
    if penalty < 0 or floor > 0:
        raise ConfigError(
            f"reward 'xmlcount' has penalty {penalty} and floor {floor}; expected penalty >= 0 >= floor"
        )
    return floor, 0.5


@reward("xmlcount", low=-10.0, high=0.5, bounds=_xmlcount_bounds, source="S2.11–S2.12")
def xmlcount(
    completion: str, *, tags: Tags = REASONING_TAGS, penalty: float = 0.001, floor: float = -10.0
) -> float:
    """0.125 for each tag that occurs once with its newlines, less a penalty per character behind the end.

    The penalty is taken twice: once with the opening answer tag for what follows the closing tag's line, and once
    with the closing tag for what follows that tag, less one character. A missing final newline therefore costs
    ``penalty`` × the whole length. Values end at ``floor``.
    """
    value = 0.125 * (completion.count(f"{tags.reasoning_open}\n") == 1)
    value += 0.125 * (completion.count(f"\n{tags.reasoning_close}\n") == 1)
    if completion.count(f"\n{tags.answer_open}\n") == 1:
        value += 0.125 - penalty * len(completion.rpartition(f"\n{tags.answer_close}\n")[2])
    if completion.count(f"\n{tags.answer_close}") == 1:
        value += 0.125 - penalty * (len(completion.rpartition(f"\n{tags.answer_close}")[2]) - 1)
    return min(0.5, max(floor, value))


@reward("think_answer_format", low=0.0, high=1.0, aliases=("format",), source="S4.18")
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
