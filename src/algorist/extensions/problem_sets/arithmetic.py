"""Procedural word problems over small integers, with demonstrations by a careless annotator, and bare sums.

A problem is a chain of two or three operations on one quantity, in varied names, things and wordings. Its
skeleton is the numbers and operations without the words, such as ``14+3*6-9``; a hash of the skeleton decides the
split, so train and test share no skeleton whatever the wording.

``careless`` is the probability with which the annotator of the demonstration writes a product as a sum ("3 bags of 6"
as 3 + 6 = 9) and then continues correctly from the wrong value. SFT imitates the mistake; a verifiable reward removes it.

``equations`` are bare sums, several to a problem: the mental arithmetic that word problems need and small models lack. A
sequence of word problems spends most of its tokens on the stories; one of these spends them on results. No equation of the test
split is in the train split, decided by a hash.
"""

from __future__ import annotations

import random
from typing import Annotated

from pydantic import Field

from algorist.data.base import id_of
from algorist.extensions.problem_sets.made import (
    Count,
    Probability,
    Split,
    draw_distinct,
    generated,
    is_held_out,
)
from algorist.types import Problem

NAMES = ["Tom", "Mia", "Ben", "Ana", "Leo", "Eva", "Sam", "Zoe", "Max", "Ida", "Tim", "Lea"]
THINGS = ["apples", "books", "coins", "cards", "stones", "pens", "shells", "eggs", "cups", "nuts"]
BOXES = ["bags", "boxes", "packs", "jars"]

START = ["{a} has {n} {t}.", "{a} owns {n} {t}.", "At first {a} has {n} {t}.", "{a} starts with {n} {t}."]
ADD = ["{a} finds {n} more.", "{a} gets {n} more.", "{b} gives {a} {n} more.", "Then {a} buys {n} more."]
SUB = ["{a} gives {n} to {b}.", "{a} loses {n}.", "{b} takes {n} away.", "Then {a} sells {n}."]
MUL_ADD = ["{a} buys {k} {x} of {n}.", "{b} brings {k} {x} of {n}.", "{a} fills {k} {x} with {n} each."]
MUL_SUB = ["{a} gives away {k} {x} of {n}.", "{a} sells {k} {x} of {n}.", "{b} takes {k} {x} of {n}."]
ASK = [
    "How many {t} does {a} have now?",
    "How many {t} are left for {a}?",
    "How many {t} has {a} at the end?",
]

MAX_VALUE = 30


def size(rng: random.Random, most: int = 600) -> int:
    """Return a number of everyday size: mostly below 20, now and then hundreds."""
    top = rng.choices((12, 40, 100, most), (45, 25, 20, 10))[0]
    return rng.randint(2, max(3, min(top, most)))


def some(rng: random.Random) -> int:
    """Draw a number of groups: mostly up to a dozen."""
    return rng.randint(2, 12) if rng.random() < 0.8 else rng.randint(13, 60)


@generated("arithmetic")
def word_problems(
    count: int = 1000,
    *,
    seed: int = 0,
    split: Split = "train",
    careless: Probability = 0.0,
    steps: Annotated[tuple[Count, ...], Field(min_length=1)] = (2, 3),
) -> list[Problem]:
    """Procedural word problems; params: ``count`` (1000), ``seed`` (0), ``careless`` (0.0), ``steps`` ([2, 3]).

    The order is fixed for a given seed and split.

    Args:
        count: Number of problems, all with different texts.
        seed: Any integer.
        split: ``train`` or ``test``; the two share no skeleton.
        careless: Probability in [0, 1] that a product is demonstrated as a sum.
        steps: Numbers of operations to choose from.

    Raises:
        DataError: A value that does not fit, or fewer problems than asked for.
    """
    rng = random.Random(f"{seed}/{split}")
    return draw_distinct(
        lambda: _problem(rng, split == "test", careless, steps), count, "arithmetic", ", or take other steps"
    )


def _problem(rng: random.Random, test: bool, careless: float, steps: tuple[int, ...]) -> Problem | None:
    """Draw a problem; None when its values leave the range or it belongs to the other split."""
    start, ops = rng.randint(3, 20), _operations(rng, rng.choice(steps))
    value, values = start, []
    for sign, times, number in ops:
        value += sign * times * number
        values.append(value)
    if min(values) < 0 or max(values) > MAX_VALUE:
        return None
    skeleton = str(start) + "".join(
        f"{'+' if s > 0 else '-'}{f'{k}*' if k > 1 else ''}{n}" for s, k, n in ops
    )
    if is_held_out(skeleton, one_in=5) != test:
        return None
    question = _tell(rng, start, ops)
    solution, shown = _demonstrate(rng, start, ops, careless)
    if min(shown) < 0 or max(shown) > MAX_VALUE:
        return None
    return Problem(
        id=id_of(question),
        question=question,
        answer=str(value),
        solution=solution,
        subject="+".join(sorted({_kind(op) for op in ops})),
        level=str(len(ops)),
        extra={"skeleton": skeleton, "demonstrated_answer": str(shown[-1])},
    )


def _operations(rng: random.Random, count: int) -> list[tuple[int, int, int]]:
    """Return (sign, times, number) triples; ``times`` 1 is a plain addition or subtraction."""
    ops = []
    for _ in range(count):
        sign = rng.choice((1, -1))
        if rng.random() < 0.5:
            ops.append((sign, rng.randint(2, 3), rng.randint(2, 5)))
        else:
            ops.append((sign, 1, rng.randint(2, 9)))
    return ops


def _kind(op: tuple[int, int, int]) -> str:
    sign, times, _ = op
    return ("add" if sign > 0 else "subtract") + ("_product" if times > 1 else "")


def _tell(rng: random.Random, start: int, ops: list[tuple[int, int, int]]) -> str:
    a, b = rng.sample(NAMES, 2)
    words = {"a": a, "b": b, "t": rng.choice(THINGS), "x": rng.choice(BOXES)}
    sentences = [rng.choice(START).format(n=start, **words)]
    for sign, times, number in ops:
        if times > 1:
            wording = rng.choice(MUL_ADD if sign > 0 else MUL_SUB)
        else:
            wording = rng.choice(ADD if sign > 0 else SUB)
        sentences.append(wording.format(n=number, k=times, **words))
    sentences.append(rng.choice(ASK).format(**words))
    return " ".join(sentences)


def _demonstrate(
    rng: random.Random, start: int, ops: list[tuple[int, int, int]], careless: float
) -> tuple[str, list[int]]:
    """Return the written steps and the value after each operation."""
    lines, value, values = [], start, []
    for sign, times, number in ops:
        amount = times * number
        if times > 1:
            slip = rng.random() < careless
            amount = times + number if slip else amount
            lines.append(f"{times} {'+' if slip else '*'} {number} = {amount}")
        lines.append(f"{value} {'+' if sign > 0 else '-'} {amount} = {value + sign * amount}")
        value += sign * amount
        values.append(value)
    return "\n".join(lines), values


WEIGHTS = {"+": 4, "-": 6, "*": 3, "/": 4}
"""Weight of each operation: the harder, the more frequent. Two-digit subtraction is the hardest of what stories need."""
MAX_PRODUCT = 1000


@generated("equations")
def equations(
    count: int = 1000,
    *,
    seed: int = 0,
    split: Split = "train",
    each: Count = 5,
    operations: Annotated[str, Field(pattern=r"^[-+*/]+$")] = "+-*/",
) -> list[Problem]:
    """Sums to work out; params: ``count`` (1000), ``seed`` (0), ``each`` (5: sums per problem), ``operations`` (``+-*/``).

    The answer is the last sum's result.

    Args:
        count: Number of problems.
        seed: Any integer.
        split: ``train`` or ``test``; the two share no sum.
        each: Sums per problem.
        operations: Any of ``+ - * /``; all results are whole and positive.

    Raises:
        DataError: A value that does not fit, or fewer problems than asked for.
    """
    rng = random.Random(f"{seed}/{split}")

    def draw() -> Problem:
        lines: list[tuple[str, int]] = []
        while len(lines) < each:
            left, result = _sum(rng, operations)
            if is_held_out(left) == (split == "test"):
                lines.append((left, result))
        question = "; ".join(left for left, _ in lines)
        solution = "\n".join(f"{left} = {result}" for left, result in lines)
        return Problem(id=id_of(question), question=question, answer=str(lines[-1][1]), solution=solution)

    return draw_distinct(draw, count, "equations", ", or take more sums per problem")


def _sum(rng: random.Random, operations: str) -> tuple[str, int]:
    """Return such as (``42 - 17``, 25)."""
    operation = rng.choices(operations, [WEIGHTS[o] for o in operations])[0]
    if operation in "+-":
        first, second = size(rng), size(rng)
        both = first + second
        return (f"{first} + {second}", both) if operation == "+" else (f"{both} - {first}", second)
    first, second = size(rng, 60), some(rng)
    product = first * second
    if product > MAX_PRODUCT:
        return _sum(rng, operation)
    if rng.random() < 0.5:
        first, second = second, first
    return (f"{first} * {second}", product) if operation == "*" else (f"{product} / {first}", second)
