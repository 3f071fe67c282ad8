"""The DAPO recipe's rules: ratio bands pay for being near. Wrong in exact arithmetic, so only there."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TypeVar

from algorist.errors import ConfigError, nearest
from algorist.prompts import Tags
from algorist.rewards.base import reward
from algorist.rewards.extract import first_block, numbers_in, plain_float

WORKING_TAGS = Tags("<start_working_out>", "<end_working_out>", "<SOLUTION>", "</SOLUTION>")


@dataclass(frozen=True, slots=True)
class AnswerTable:
    """What ``check_answer`` pays; ``raw`` compares the block unstripped, and ``spaces`` then means stripped."""

    exact: float
    spaces: float
    within_10: float
    within_20: float
    wrong: float
    not_a_number: float
    missing: float


@dataclass(frozen=True, slots=True)
class NumberTable:
    """What ``check_numbers`` pays."""

    equal: float
    within_10: float
    within_20: float
    wrong: float
    not_a_number: float
    missing: float


# "bounded" keeps the documented range of the system; "origin" and "notebook" are what its code and its model did.
ANSWER_TABLES = {
    "bounded": AnswerTable(5.0, 3.5, 2.0, 1.5, -2.0, -2.0, -2.0),
    "origin": AnswerTable(5.0, 3.5, 2.0, 1.5, -2.5, -2.5, -2.0),
    "notebook": AnswerTable(5.0, 3.5, 2.0, 1.5, -2.5, -4.5, -2.0),
}
NUMBER_TABLES = {
    "bounded": NumberTable(3.0, 2.5, 1.5, -1.5, -1.5, -1.5),
    "origin": NumberTable(4.0, 2.5, 1.5, -2.0, -2.0, -1.5),
    "notebook": NumberTable(3.5, -1.5, -1.5, -1.5, 0.0, -2.5),
}


Table = TypeVar("Table", AnswerTable, NumberTable)


def _table(name: str, tables: dict[str, Table], variant: str) -> Table:
    if variant not in tables:
        raise ConfigError(
            f"reward '{name}' has no variant '{variant}'.{nearest(variant, tables)} Known: {', '.join(tables)}"
        )
    return tables[variant]


def _answer_bounds(*, variant: str) -> tuple[float, float]:
    values = astuple(_table("check_answer", ANSWER_TABLES, variant))
    return min(values), max(values)


def _number_bounds(*, variant: str) -> tuple[float, float]:
    values = astuple(_table("check_numbers", NUMBER_TABLES, variant))
    return min(values), max(values)


def _band(value: float, truth: float) -> str:
    """Return which band of value / truth the value falls in; with truth 0 only 0 itself is right."""
    if truth == 0:
        return "equal" if value == 0 else "wrong"
    ratio = value / truth
    if 0.9 <= ratio <= 1.1:
        return "within_10"
    return "within_20" if 0.8 <= ratio <= 1.2 else "wrong"


@reward("check_answer", low=-2.0, high=5.0, bounds=_answer_bounds, source="S1.41, S1.43–S1.44, section 6.3")
def check_answer(completion: str, *, gold: str, tags: Tags = WORKING_TAGS, variant: str = "bounded") -> float:
    """5 for the gold text, 3.5 when only spaces differ, 2 or 1.5 for numbers within 10 or 20 percent, else -2.

    Variants "origin" (wrong -2.5) and "notebook" (wrong -2.5, no number -4.5; the block is compared as it stands, so
    surrounding whitespace already costs 1.5) leave the documented range.
    """
    table = _table("check_answer", ANSWER_TABLES, variant)
    block = first_block(completion, tags.answer_open, tags.answer_close)
    if block is None:
        return table.missing
    truth = gold.strip()
    if (block if variant == "notebook" else block.strip()) == truth:
        return table.exact
    squeezed = block.strip() if variant == "notebook" else "".join(block.split())
    if squeezed == (truth if variant == "notebook" else "".join(truth.split())):
        return table.spaces
    value, expected = plain_float(block), plain_float(truth)
    if value is None or expected is None:
        return table.not_a_number
    band = _band(value, expected)
    return table.exact if band == "equal" else float(getattr(table, band))


@reward("check_numbers", low=-1.5, high=3.0, bounds=_number_bounds, source="S1.42–S1.44, section 6.3")
def check_numbers(
    completion: str, *, gold: str, tags: Tags = WORKING_TAGS, variant: str = "bounded"
) -> float:
    """3 when the first number of the solution is the gold number, 2.5 or 1.5 within 10 or 20 percent, else -1.5.

    Variants: "origin" (4, wrong -2) and "notebook" (3.5, no bands, commas dropped, none -2.5, gold no number 0).
    """
    table = _table("check_numbers", NUMBER_TABLES, variant)
    block = first_block(completion, tags.answer_open, tags.answer_close)
    numbers = numbers_in(block or "")
    if not numbers:
        return table.missing
    first, truth = numbers[0], gold.strip()
    if variant == "notebook":
        first, truth = first.replace(",", ""), truth.replace(",", "")
    value, expected = plain_float(first), plain_float(truth)
    if value is None or expected is None:
        return table.not_a_number
    if abs(value - expected) <= 1e-6:
        return table.equal
    return float(getattr(table, _band(value, expected)))
