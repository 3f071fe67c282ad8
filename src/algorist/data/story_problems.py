"""Procedural word problems in the manner of elementary-school collections: varied stories, unknowns and needless numbers.

A problem takes one of the worlds of ``story_worlds.yaml``, draws its numbers, tells all facts but the asked one, and often adds a number that
nothing asks for. Train and test share no triple of world, unknown and numbers, decided by a hash. The solution is one
equation per line, the last of which gives the answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from algorist.data.base import Probability, Split, draw_distinct, generated, id_of, is_held_out
from algorist.errors import DataError, nearest
from algorist.types import Problem

MAX_ANSWER = 1000
_NAMES = re.compile(r"{(\w+)}")
Numbers = dict[str, int]


@dataclass(frozen=True)
class World:
    """Quantities that belong together; the file says what ``facts`` and ``unknowns`` hold."""

    kind: str
    draw: Callable[[random.Random], Numbers]
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
    worlds = _file("story_worlds.yaml")["worlds"] + (_file("story_traps.yaml")["worlds"] if traps else [])
    return tuple(
        World(
            world["kind"],
            DRAWS[world["numbers"]],
            world["facts"],
            world["unknowns"],
            world.get("spare", 0.0),
            world.get("shuffled", False),
        )
        for world in worlds
    )


@cache
def _file(name: str) -> dict[str, Any]:
    return yaml.safe_load(files("algorist.data").joinpath(name).read_text(encoding="utf-8"))


def size(rng: random.Random, most: int = 600) -> int:
    """Return a number of everyday size: mostly below 20, now and then hundreds."""
    top = rng.choices((12, 40, 100, most), (45, 25, 20, 10))[0]
    return rng.randint(2, max(3, min(top, most)))


def _loss(rng: random.Random) -> Numbers:
    change, end = size(rng), size(rng)
    return {"s": change + end, "c": change, "e": end}


def _gain(rng: random.Random) -> Numbers:
    change, start = size(rng), size(rng)
    return {"s": start, "c": change, "e": change + start}


def _three(rng: random.Random) -> Numbers:
    x, y, z = size(rng), size(rng), size(rng)
    return {"x": x, "y": y, "z": z, "xy": x + y, "all": x + y + z}


def _difference(rng: random.Random) -> Numbers:
    small, more = size(rng), size(rng)
    return {"x": small + more, "y": small, "d": more}


def _chain(rng: random.Random) -> Numbers:
    z, e, d = size(rng, 90), size(rng, 40), size(rng, 40)
    return {"z": z, "e": e, "y": z + e, "d": d, "x": z + e + d, "de": d + e}


def _groups(rng: random.Random) -> Numbers:
    n, k = size(rng, 60), rng.randint(2, 12) if rng.random() < 0.8 else rng.randint(13, 60)
    return {"k": k, "n": n, "p": k * n}


def _groups_more(rng: random.Random) -> Numbers:
    groups = _groups(rng)
    m = size(rng, 90)
    return groups | {"m": m, "all": groups["p"] + m}


def _groups_less(rng: random.Random) -> Numbers:
    groups = _groups(rng)
    m = rng.randint(1, max(1, groups["p"] - 1))
    return groups | {"m": m, "all": groups["p"] - m}


def _two_groups(rng: random.Random) -> Numbers:
    k, n, j, m = (rng.randint(2, 12) for _ in range(4))
    return {"k": k, "n": n, "j": j, "m": m, "p": k * n, "q": j * m, "all": k * n + j * m}


def _in_out(rng: random.Random) -> Numbers:
    s, g = size(rng, 120), size(rng, 120)
    c = rng.randint(1, s + g - 1)
    return {"s": s, "h": g, "c": c, "m": s + g, "e": s + g - c}


def _two_out(rng: random.Random) -> Numbers:
    c, g, e = size(rng, 120), size(rng, 120), size(rng, 120)
    return {"s": c + g + e, "c": c, "h": g, "cg": c + g, "e": e}


def _need(rng: random.Random) -> Numbers:
    put, more = rng.randint(1, 14), rng.randint(1, 14)
    return {"s": put + more, "c": put, "e": more, "o": rng.randint(1, 14)}


def _per_time(rng: random.Random) -> Numbers:
    n, k = size(rng, 60), rng.randint(2, 30)
    return {"k": k, "n": n, "p": n * k}


def _two_losses(rng: random.Random) -> Numbers:
    q, more, left, right = (size(rng) for _ in range(4))
    p = q + more
    x, y = p + left, q + right
    return {"x": x, "p": p, "l": left, "y": y, "q": q, "m": right, "d": more, "pq": p + q, "xy": x + y}


def _pairs(rng: random.Random) -> Numbers:
    y, d, z = size(rng), size(rng), size(rng)
    x = y + d
    return {"x": x, "y": y, "z": z, "d": d, "xy": x + y, "yz": y + z, "xz": x + z, "e": z + d}


def _net(rng: random.Random) -> Numbers:
    s, c, n = size(rng, 120), size(rng, 120), size(rng, 120)
    return {"s": s, "h": n + c, "c": c, "n": n, "m": s + n + c, "e": s + n}


def _survived(rng: random.Random) -> Numbers:
    e, m = size(rng), size(rng)
    return {"s": 2 * e + m, "c": e + m, "e": e, "m": m}


def _prices(rng: random.Random) -> Numbers:
    m, d, k, j = (rng.randint(2, 20) for _ in range(4))
    n = m + d
    return {"n": n, "m": m, "d": d, "k": k, "j": j, "p": n * k, "q": m * j, "kj": k + j}


def _equal_gifts(rng: random.Random) -> Numbers:
    k, n, m = rng.randint(2, 12), size(rng, 40), size(rng, 40)
    return {"k": k, "n": n, "m": m, "p": k * n, "q": k * m}


def _rows_of_two(rng: random.Random) -> Numbers:
    k, n, m = rng.randint(2, 20), rng.randint(2, 20), rng.randint(2, 20)
    return {"k": k, "n": n, "m": m, "p": k * n, "q": k * m, "all": k * (n + m)}


DRAWS: dict[str, Callable[[random.Random], Numbers]] = {
    "loss": _loss,
    "gain": _gain,
    "three": _three,
    "difference": _difference,
    "chain": _chain,
    "groups": _groups,
    "groups_more": _groups_more,
    "groups_less": _groups_less,
    "two_groups": _two_groups,
    "in_out": _in_out,
    "two_out": _two_out,
    "need": _need,
    "per_time": _per_time,
    "two_losses": _two_losses,
    "pairs": _pairs,
    "net": _net,
    "survived": _survived,
    "prices": _prices,
    "equal_gifts": _equal_gifts,
    "rows_of_two": _rows_of_two,
}


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
        if kind not in known:
            raise DataError(
                f"story_problems has no kind '{kind}'.{nearest(kind, known)} Expected: {', '.join(known)}"
            )
    worlds = [w for w in story_worlds(traps or bool(kinds)) if not kinds or w.kind in kinds]
    rng = random.Random(f"{seed}/{split}")
    return draw_distinct(
        lambda: _problem(rng, split == "test", needless, worlds), count, "story_problems", ""
    )


def _problem(rng: random.Random, test: bool, needless: float, worlds: list[World]) -> Problem | None:
    """Draw a problem; None when its numbers are too large or it belongs to the other split."""
    world = rng.choice(worlds)
    numbers = world.draw(rng)
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
