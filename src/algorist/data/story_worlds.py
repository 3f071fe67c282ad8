"""The worlds of ``story_problems``, read from ``story_worlds.yaml`` and ``story_traps.yaml``, and how their numbers are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

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
    found = _file("story_worlds.yaml")["worlds"] + (_file("story_traps.yaml")["worlds"] if traps else [])
    return tuple(
        World(
            world["kind"],
            DRAWS[world["numbers"]],
            world["facts"],
            world["unknowns"],
            world.get("spare", 0.0),
            world.get("shuffled", False),
        )
        for world in found
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
