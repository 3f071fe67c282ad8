"""Countdown: make a target from a few numbers. Any expression that uses the numbers and gives the target is right.

A problem is made from a random expression; a hash of its sorted numbers and target decides the split, so train and test share
none. A demonstration tries up to ``tries`` other expressions before the right one. ``careless`` is the probability with which it
ends at a wrong one of them: SFT imitates that, and a verifiable reward teaches to try until the target is met.
"""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from algorist.data.base import id_of
from algorist.extensions.problem_sets.made import Count, Split, draw_distinct, generated, is_held_out
from algorist.types import Problem
from algorist_grader.countdown import value_of


@generated(
    "countdown",
    "name=local with columns question, answer, numbers and target, and data.….checker=countdown, for rows of your own",
)
def countdown_problems(
    count: int = 1000,
    *,
    seed: int = 0,
    split: Split = "train",
    numbers: Annotated[tuple[Count, ...], Field(min_length=1)] = (3, 4),
    max_number: Count = 20,
    max_target: int = 100,
    operators: Annotated[str, Field(pattern=r"^[-+*/]+$")] = "+-*/",
    exact: bool = True,
    tries: int = 2,
    careless: float = 0.0,
) -> list[Problem]:
    """Make a target from numbers; params: ``count``, ``seed``, ``numbers`` ((3, 4)), ``max_number``, ``max_target``, ``operators``, ``exact``, ``tries``, ``careless``.

    ``numbers`` are the sizes to choose from, ``exact`` whether every number must be used (else at most once each).
    """
    rng = random.Random(f"{seed}/{split}")

    def draw() -> Problem | None:
        taken = [rng.randint(1, max_number) for _ in range(rng.choice(numbers))]
        expression, target = _expression(rng, taken, operators)
        if target is None or target.denominator != 1 or not 0 < target <= max_target:
            return None
        trials = [_expression(rng, taken, operators) for _ in range(rng.randint(0, tries))]
        steps = [(text, value) for text, value in trials if value not in (None, target)]
        if not steps or rng.random() >= careless:
            steps.append((expression, target))
        shown = sorted(taken)
        if is_held_out(f"{shown}/{target}") != (split == "test"):
            return None
        listed = f"{', '.join(map(str, shown[:-1]))} and {shown[-1]}"
        once = "each number once" if exact else "each number at most once"
        question = f"Make {target} from {listed}, using {once} and any of {' '.join(operators)}."
        answer = {"demonstrated_answer": steps[-1][0]}
        return Problem(
            id=id_of(question),
            question=question,
            answer=expression,
            solution="\n".join(f"{text} = {value}" for text, value in steps),
            level=str(len(taken)),
            extra={"numbers": shown, "target": int(target), "exact": exact, **answer},
            checker="countdown",
        )

    return draw_distinct(draw, count, "countdown", ", or raise max_number or max_target")


def _expression(rng: random.Random, numbers: list[int], operators: str) -> tuple[str, Fraction | None]:
    """Return a random expression over the numbers, left to right with brackets where the order needs them, and its value."""
    first, *rest = rng.sample(numbers, len(numbers))
    text, loose = str(first), False
    for number in rest:
        operator = rng.choice(operators)
        if loose and operator in "*/":
            text = f"({text})"
        loose = operator in "+-"
        text = f"{text} {operator} {number}"
    return text, value_of(text)[0]
