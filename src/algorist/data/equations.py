"""Bare sums, several to a problem: the mental arithmetic that word problems need and small models lack.

A sequence of word problems spends most of its tokens on the stories; one of these spends them on results. No equation of
the test split is in the train split, decided by a hash.
"""

from __future__ import annotations

import random

from algorist.data.base import Source, dataset, draw_distinct, id_of, is_held_out, params_of
from algorist.data.story_worlds import size
from algorist.errors import DataError
from algorist.types import Problem

WEIGHTS = {"+": 4, "-": 6, "*": 3, "/": 4}
"""How often each operation comes: the harder, the oftener. Two-digit subtraction is the hardest of what stories need."""
MAX_PRODUCT = 1000


@dataset("equations")
def load_equations(source: Source) -> list[Problem]:
    """Sums to work out; params: ``count`` (1000), ``seed`` (0), ``each`` (5: sums per problem), ``operations`` (``+-*/``)."""
    params = params_of(source, "equations", {"count": 1000, "seed": 0, "each": 5, "operations": "+-*/"})
    return equations(split=source.split, **params)


def equations(
    count: int, *, seed: int = 0, split: str = "train", each: int = 5, operations: str = "+-*/"
) -> list[Problem]:
    """Return ``count`` problems of ``each`` sums; the answer is the last one's result.

    Args:
        count: Number of problems.
        seed: Any integer.
        split: ``train`` or ``test``; the two share no sum.
        each: Sums per problem, at least 1.
        operations: Any of ``+ - * /``; all results are whole and positive.

    Raises:
        DataError: No sum per problem, or another operation.
    """
    if each < 1:
        raise DataError(f"equations: each is {each}; expected at least 1 sum per problem")
    if not operations or set(operations) - set(WEIGHTS):
        raise DataError(f"equations: operations is '{operations}'; expected some of {''.join(WEIGHTS)}")
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
    first, second = size(rng, 60), rng.randint(2, 12) if rng.random() < 0.8 else rng.randint(13, 60)
    product = first * second
    if product > MAX_PRODUCT:
        return _sum(rng, operation)
    if rng.random() < 0.5:
        first, second = second, first
    return (f"{first} * {second}", product) if operation == "*" else (f"{product} / {first}", second)
