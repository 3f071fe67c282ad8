"""Bare sums: right, as many as asked for, of the operations asked for, none in both splits."""

from __future__ import annotations

import pytest

from algorist.data import DATASETS, Source
from algorist.errors import DataError
from algorist.extensions.problem_sets.arithmetic import equations
from algorist.types import Problem


def sums(problems: list[Problem]) -> list[str]:
    return [line for problem in problems for line in (problem.solution or "").splitlines()]


def test_every_sum_is_right_whole_and_positive() -> None:
    problems = equations(800, seed=2, each=4)
    for line in sums(problems):
        left, result = line.split(" = ")
        assert eval(left) == int(result) > 0
    for problem in problems:
        lefts = [line.partition(" = ")[0] for line in (problem.solution or "").splitlines()]
        assert problem.question == "; ".join(lefts) and len(lefts) == 4
        assert (problem.solution or "").endswith(f" = {problem.answer}")
    by_operation = {o: sum(f" {o} " in line for line in sums(problems)) for o in "+-*/"}
    assert sum(by_operation.values()) == 3200 and min(by_operation.values()) > 400
    assert by_operation["-"] > 1.2 * by_operation["+"]


def test_the_same_seed_gives_the_same_problems_and_splits_share_no_sum() -> None:
    train, test = equations(500, seed=1), equations(100, seed=1, split="test")
    assert train == equations(500, seed=1) and train != equations(500, seed=2)
    assert not set(sums(train)) & set(sums(test))


@pytest.mark.slow
def test_params_are_checked() -> None:
    load = DATASETS.get("equations")
    found = load(Source(params={"count": 20, "each": 2, "operations": "-"}))
    assert len(found) == 20 and all(" - " in line for line in sums(found)) and len(sums(found)) == 40
    for params, message in (
        ({"each": 0}, "each is 0. Input should be greater than or equal to 1"),
        ({"operations": "%"}, r"operations is '%'.*such as '\+-\*/'"),
        ({"eech": 2}, "Did you mean 'each'"),
        ({"count": 10**6, "each": 1, "operations": "*"}, "or take more sums per problem"),
    ):
        with pytest.raises(DataError, match=message):
            load(Source(params=params))
