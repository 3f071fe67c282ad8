"""Procedural word problems in the manner of elementary-school collections: varied stories, unknowns and needless numbers.

A problem takes one of the worlds of ``story_worlds.yaml``, draws its numbers, tells all facts but the asked one, and often adds a number that
nothing asks for. Train and test share no triple of world, unknown and numbers, decided by a hash. The solution is one
equation per line, the last of which gives the answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from types import CodeType
from typing import Any

import yaml

from algorist.data.base import id_of
from algorist.errors import DataError, check_known
from algorist.extensions.problem_sets.arithmetic import size, some
from algorist.extensions.problem_sets.made import Probability, Split, draw_distinct, generated, is_held_out
from algorist.types import Problem

MAX_ANSWER = 1000
_NAMES = re.compile(r"{(\w+)}")
Numbers = dict[str, int]


@dataclass(frozen=True)
class World:
    """Quantities that belong together; the file says what ``facts`` and ``unknowns`` hold."""

    kind: str
    numbers: dict[str, str]
    facts: dict[str, dict[str, list[str]]]
    unknowns: dict[str, dict[str, list[str]]]
    spare: float
    shuffled: bool


@cache
def story_words() -> dict[str, Any]:
    """Return the names, things, places and sentences that all stories share."""
    return _file("story_worlds.yaml")["words"]


@cache
def story_worlds(traps: bool = False) -> tuple[World, ...]:
    """Return the worlds in the order of the files: the plain ones, with ``traps`` all."""
    numbers = _file("story_worlds.yaml")["numbers"]
    worlds = _file("story_worlds.yaml")["worlds"] + (_file("story_traps.yaml")["worlds"] if traps else [])
    return tuple(
        World(
            world["kind"],
            numbers[world["numbers"]],
            world["facts"],
            world["unknowns"],
            world.get("spare", 0.0),
            world.get("shuffled", False),
        )
        for world in worlds
    )


@cache
def _file(name: str) -> dict[str, Any]:
    return yaml.safe_load(files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _draw(rng: random.Random, numbers: Mapping[str, str]) -> Numbers:
    """Return the quantities of a world, drawn or computed in the order of the table ``numbers``."""
    ways = {"size": partial(size, rng), "between": rng.randint, "some": partial(some, rng)}
    drawn: Numbers = {}
    for name, how in numbers.items():
        drawn[name] = eval(_compiled(how), {"__builtins__": {}}, ways | drawn)
    return drawn


@cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "story_worlds.yaml", "eval")


@generated("story_problems")
def story_problems(
    count: int = 1000,
    *,
    seed: int = 0,
    split: Split = "train",
    needless: Probability = 0.4,
    traps: bool = False,
    kinds: tuple[str, ...] = (),
) -> list[Problem]:
    """Varied word problems; params: ``count`` (1000), ``seed`` (0), ``needless`` (0.4), ``traps`` (false), ``kinds`` (all).

    The order is fixed for a given seed and split.

    Args:
        count: Number of problems, all with different texts.
        seed: Any integer.
        split: ``train`` or ``test``; no world has the same numbers and unknown in both.
        needless: Probability in [0, 1] that the story has a number which nothing asks for.
        traps: Also take the worlds whose stories mislead: numbers of other things, in any order.
        kinds: Names of worlds to draw from; all when empty.

    Raises:
        DataError: A value that does not fit, or an unknown kind.
    """
    known = [world.kind for world in story_worlds(traps=True)]
    for kind in kinds:
        check_known(kind, known, f"story_problems has no kind '{kind}'", kind=DataError)
    worlds = [w for w in story_worlds(traps or bool(kinds)) if not kinds or w.kind in kinds]
    rng = random.Random(f"{seed}/{split}")
    return draw_distinct(
        lambda: _problem(rng, split == "test", needless, worlds), count, "story_problems", ""
    )


def _problem(rng: random.Random, test: bool, needless: float, worlds: list[World]) -> Problem | None:
    """Draw a problem; None when its numbers are too large or it belongs to the other split."""
    world = rng.choice(worlds)
    numbers = _draw(rng, world.numbers)
    unknown = rng.choice(list(world.unknowns))
    if max(numbers.values()) > MAX_ANSWER:
        return None
    if is_held_out(f"{world.kind}/{unknown}/{sorted(numbers.items())}") != test:
        return None
    question = _tell(rng, world, numbers, unknown, needless)
    steps = [step.format(**numbers) for step in world.unknowns[unknown]["steps"]]
    return Problem(
        id=id_of(question),
        question=question,
        answer=str(numbers[unknown]),
        solution="\n".join(steps),
        subject=world.kind,
        level=str(len(steps)),
    )


def _words(rng: random.Random) -> dict[str, str]:
    words = story_words()
    he = rng.random() < 0.5
    a = rng.choice(words["men" if he else "women"])
    b, g = rng.sample([name for name in words["men"] + words["women"] if name != a], 2)
    t, u, v = rng.sample(words["things"], 3)
    c1, c2 = rng.sample(words["attributes"], 2)
    did, units = rng.choice(words["activities"])
    d1, d2, d3 = rng.sample(words["days"], 3)
    f1, f2 = rng.sample(words["foods"], 2)
    sentence = {"a": a, "b": b, "g": g, "A": rng.choice((a, "He" if he else "She")), "t": t, "u": u, "v": v}
    sentence |= {"c1": c1, "c2": c2, "did": did, "units": units}
    sentence |= {"d1": d1, "d2": d2, "d3": d3, "f1": f1, "f2": f2}
    lists = {"boxes": "boxes", "people": "people", "place": "places", "dish": "dishes", "cups": "cups"}
    return sentence | {name: rng.choice(words[listed]) for name, listed in lists.items()}


def _tell(rng: random.Random, world: World, numbers: dict[str, int], unknown: str, needless: float) -> str:
    """Return the story without the asked quantity, then the question."""
    questions, needed = world.unknowns[unknown]["questions"], _needed(world.unknowns[unknown]["steps"])
    words, sentences = _words(rng) | {"w": str(size(rng, 90))}, []
    for key, fact in world.facts.items():
        spare = world.spare > 0 and rng.random() < world.spare
        if key != unknown and (spare or needed & set(_NAMES.findall(fact["known"][0]))):
            sentences.append(rng.choice(fact["known"]).format(**words, **numbers))
        elif "unknown" in fact:
            sentences.append(rng.choice(fact["unknown"]).format(**words, **numbers))
    if world.shuffled:
        rng.shuffle(sentences)
    if rng.random() < needless:
        place = rng.randint(1, len(sentences))
        sentences.insert(place, rng.choice(story_words()["needless"]).format(**words))
    question = rng.choice(questions).format(**words, **numbers)
    if rng.random() < 0.15:  # the last sentence as a condition: "If …, how many …"
        last = sentences.pop()
        first = last.split(" ", 1)[0]
        is_name = first in story_words()["men"] + story_words()["women"]
        head = last if is_name or first.isdigit() else last[0].lower() + last[1:]
        question = f"If {head.rstrip('.')}, {question[0].lower()}{question[1:]}"
    return " ".join([*sentences, question])


def _needed(steps: list[str]) -> set[str]:
    """Return the names that steps such as ``{s} + {h} = {m}`` take from the story."""
    sides = [_NAMES.findall(step) for step in steps]
    return {name for *taken, _ in sides for name in taken} - {result for *_, result in sides}
