"""Varied word problems: every solution computes its answer from numbers that the story tells, and splits share no problem."""

from __future__ import annotations

import re

import pytest

from algorist.data import DATASETS, Source
from algorist.errors import DataError
from algorist.extensions.problem_sets.story_problems import story_problems, story_worlds
from algorist.types import Problem


def numbers(text: str) -> set[int]:
    return {int(found) for found in re.findall(r"\d+", text)}


def load(**params: object) -> list[Problem]:
    return DATASETS.get("story_problems")(Source("train", params=dict(params)))


def test_solutions_compute_the_answer_from_what_the_story_tells() -> None:
    problems = story_problems(3000, seed=1)
    assert {p.subject for p in problems} == {world.kind for world in story_worlds()}
    for problem in problems:
        known = numbers(problem.question)
        for line in problem.solution.splitlines():
            left, result = line.split(" = ")
            assert eval(left) == int(result), line
            assert numbers(left) <= known, f"{problem.question} | {line}"
            known.add(int(result))
        assert problem.answer == problem.solution.rpartition("= ")[2]
        assert "{" not in problem.question and problem.question.endswith("?")


def test_the_same_seed_gives_the_same_problems_and_splits_share_none() -> None:
    train, test = story_problems(400, seed=3), story_problems(400, seed=3, split="test")
    assert train == story_problems(400, seed=3) and train != story_problems(400, seed=4)
    assert not {p.question for p in train} & {p.question for p in test}
    # A number that nothing asks for is told in about the share of problems that was asked for.
    spare = [sum(len(numbers(p.question)) for p in story_problems(400, needless=n)) for n in (0.0, 1.0)]
    assert 300 < spare[1] - spare[0] <= 400


def test_svamp_300_comes_with_the_package() -> None:
    problems = DATASETS.get("svamp_300")(Source("test"))
    assert len({p.id for p in problems}) == 300
    assert (problems[0].id, problems[0].answer, problems[0].subject) == ("chal-777", "145", "Common-Division")
    made = {p.question for p in story_problems(5000, seed=1)}
    assert not made & {p.question for p in problems}  # it is held out
    with pytest.raises(DataError, match="all of SVAMP is name=svamp"):
        DATASETS.get("svamp_300")(Source("test", path="svamp.jsonl"))


def test_wrong_params_are_refused() -> None:
    assert {p.subject for p in load(count=5, kinds=["price"])} == {"price"}
    with pytest.raises(DataError, match=r"no kind 'prise'\. Did you mean 'price'"):
        load(kinds=["prise"])
    with pytest.raises(DataError, match=r"the key 'cuont'\. Did you mean 'count'"):
        load(cuont=3)
    with pytest.raises(DataError, match="needless is 2"):
        load(needless=2)


def test_traps_tell_more_than_is_needed_in_any_order() -> None:
    problems = story_problems(4000, seed=1, traps=True)
    plain = {world.kind for world in story_worlds()}
    assert {p.subject for p in problems} == {world.kind for world in story_worlds(traps=True)} > plain
    traps = [p for p in problems if p.subject not in plain]
    assert len(traps) > 1500
    for problem in problems:
        known = numbers(problem.question)
        for line in problem.solution.splitlines():
            left, result = line.split(" = ")
            assert eval(left) == int(result) and numbers(left) <= known, f"{problem.question} | {line}"
            known.add(int(result))
        assert problem.answer == problem.solution.rpartition("= ")[2] and int(problem.answer) > 0
        assert "{" not in problem.question and problem.question.endswith("?")
    # The first two numbers of the story are often not those of the first equation, nor in its order.
    naive = [re.findall(r"\d+", p.question)[:2] == re.findall(r"\d+", p.solution)[:2] for p in traps]
    assert sum(naive) < 0.35 * len(naive)
    # Without traps nothing has changed: recorded results stay reproducible.
    first = story_problems(1, seed=1)[0]
    assert (
        first.question
        == "Adam bought 6 games. Adam is 9 years old. Each of the games costs $4. What is the total cost?"
    )
