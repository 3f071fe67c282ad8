"""The worlds that ``story_problems`` tells of: a few quantities that belong together, and ways to tell and to ask each.

A world is a table: how its numbers are drawn, a fact for each quantity in the order of telling, and for each quantity that
can be asked the questions and the steps that answer them. The wordings are our own; none is taken from a benchmark.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Numbers = dict[str, int]


@dataclass(frozen=True)
class World:
    """Quantities that belong together.

    ``facts`` tells a quantity: the wordings separated by ``|``, and behind ``~`` how the story goes on when the quantity is
    what is asked (nothing: the sentence is left out). ``asked`` has, for a quantity, the questions separated by ``|`` and
    the steps separated by ``;``, each ``left = quantity``.
    """

    kind: str
    draw: Callable[[random.Random], Numbers]
    facts: dict[str, str]
    asked: dict[str, tuple[str, str]]


def size(rng: random.Random, most: int = 600) -> int:
    """Return a number of everyday size: mostly below 20, now and then hundreds."""
    top = rng.choices((12, 40, 100, most), (45, 25, 20, 10))[0]
    return rng.randint(2, max(3, min(top, most)))


def _change(rng: random.Random) -> Numbers:
    change, end = size(rng), size(rng)
    return {"s": change + end, "c": change, "e": end}


def _three(rng: random.Random) -> Numbers:
    x, y, z = size(rng), size(rng), size(rng)
    return {"x": x, "y": y, "z": z, "xy": x + y, "all": x + y + z}


def _compare(rng: random.Random) -> Numbers:
    small, more = size(rng), size(rng)
    return {"x": small + more, "y": small, "d": more}


def _chain(rng: random.Random) -> Numbers:
    z, e, d = size(rng, 90), size(rng, 40), size(rng, 40)
    return {"z": z, "e": e, "y": z + e, "d": d, "x": z + e + d, "de": d + e}


def _groups(rng: random.Random) -> Numbers:
    n, k = size(rng, 60), rng.randint(2, 12) if rng.random() < 0.8 else rng.randint(13, 60)
    return {"k": k, "n": n, "p": k * n}


def _groups_more(rng: random.Random) -> Numbers:
    found = _groups(rng)
    m = size(rng, 90)
    return found | {"m": m, "all": found["p"] + m}


def _groups_less(rng: random.Random) -> Numbers:
    found = _groups(rng)
    m = rng.randint(1, max(1, found["p"] - 1))
    return found | {"m": m, "all": found["p"] - m}


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


WORLDS = (
    World(
        "give",
        _change,
        {
            "s": "{a} had {s} {t}.|{a} owned {s} {t}.|There were {s} {t} in {a}'s room.~{a} had some {t}.",
            "c": "{A} gave {c} of them to {b}.|{A} lost {c} {t}.|{A} sold {c} {t} at the fair.|{b} borrowed {c} of the {t}.~{A} gave some {t} to {b}.",
            "e": "Now {a} has {e} {t}.|{A} has {e} {t} left.|After that {e} {t} remained.~",
        },
        {
            "e": (
                "How many {t} does {a} have now?|How many {t} are left?|How many {t} does {a} still have?",
                "{s} - {c} = {e}",
            ),
            "s": (
                "How many {t} did {a} have at first?|How many {t} did {a} have in the beginning?|How many {t} were there before?",
                "{c} + {e} = {s}",
            ),
            "c": ("How many {t} did {a} give away?|How many {t} are gone?", "{s} - {e} = {c}"),
        },
    ),
    World(
        "get",
        lambda rng: (lambda n: {"s": n["e"], "c": n["c"], "e": n["s"]})(_change(rng)),
        {
            "s": "{a} had {s} {t}.|There were {s} {t} on the shelf.|{a} collected {s} {t} last week.~{a} had some {t}.",
            "c": "{A} found {c} more {t}.|{b} gave {a} {c} {t}.|{A} bought {c} new {t}.~{A} got some more {t}.",
            "e": "Now {a} has {e} {t}.|Now there are {e} {t} in all.|{A} then counted {e} {t}.~",
        },
        {
            "e": (
                "How many {t} does {a} have now?|How many {t} are there altogether?|What is the number of {t} now?",
                "{s} + {c} = {e}",
            ),
            "s": (
                "How many {t} did {a} have before?|How many {t} were there at the start?",
                "{e} - {c} = {s}",
            ),
            "c": (
                "How many {t} did {a} get?|How many {t} were added?|How many more {t} did {a} get?",
                "{e} - {s} = {c}",
            ),
        },
    ),
    World(
        "come_and_go",
        _in_out,
        {
            "s": "There were {s} {people} {place}.|{s} {people} were {place}.~",
            "h": "Then {h} more {people} came.|{h} more {people} joined them.~",
            "c": "After a while {c} {people} left.|Then {c} of them went home.~",
        },
        {
            "e": (
                "How many {people} are {place} now?|How many {people} are still {place}?",
                "{s} + {h} = {m};{m} - {c} = {e}",
            ),
            "m": (
                "How many {people} were {place} before some left?|How many {people} came in all?",
                "{s} + {h} = {m}",
            ),
        },
    ),
    World(
        "two_kinds",
        _three,
        {
            "x": "{a} has {x} {c1} {t}.|There are {x} {c1} {t} in the box.|{a} picked {x} {c1} {t}.~",
            "y": "{A} also has {y} {c2} {t}.|There are {y} {c2} {t} too.|{A} has {y} {c2} {t} as well.~",
            "z": "{b} has {z} {t}.|{b} found {z} {u}.|{A} has {z} {u}.~",
        },
        {
            "xy": (
                "How many {c1} and {c2} {t} does {a} have in total?|What is the total number of {c1} and {c2} {t}?|How many {c1} and {c2} {t} are there altogether?",
                "{x} + {y} = {xy}",
            )
        },
    ),
    World(
        "three_days",
        _three,
        {
            "x": "{a} {did} {x} {units} on {d1}.|On {d1} {a} {did} {x} {units}.~",
            "y": "On {d2} {a} {did} {y} {units}.|{A} {did} {y} {units} on {d2}.~",
            "z": "On {d3} {a} {did} {z} {units}.|{A} {did} {z} {units} on {d3}.~",
        },
        {
            "all": (
                "How many {units} is that in all three days?|How many {units} is that altogether?",
                "{x} + {y} = {xy};{xy} + {z} = {all}",
            ),
            "xy": (
                "How many {units} is that on {d1} and {d2} together?|How many {units} did {a} do on {d1} and {d2}?",
                "{x} + {y} = {xy}",
            ),
        },
    ),
    World(
        "compare",
        _compare,
        {
            "x": "{a} has {x} {t}.|{a} counted {x} {t}.|In one basket there are {x} {t}.~{a} has some {t}.",
            "y": "{b} has {y} {t}.|{b} counted {y} {t}.~{b} has fewer {t}.",
            "d": "{a} has {d} more {t} than {b}.|{b} has {d} {t} fewer than {a}.|{b} has {d} less {t} than {a}.~",
        },
        {
            "d": (
                "How many more {t} does {a} have than {b}?|How many fewer {t} does {b} have than {a}?|What is the difference between their {t}?",
                "{x} - {y} = {d}",
            ),
            "x": (
                "How many {t} does {a} have?|What is the number of {t} that {a} has?",
                "{y} + {d} = {x}",
            ),
            "y": (
                "How many {t} does {b} have?|What is the number of {t} that {b} has?",
                "{x} - {d} = {y}",
            ),
        },
    ),
    World(
        "compare_two_things",
        _three,
        {
            "x": "{a} has {x} {t} and {z} {u}.|{a} packed {x} {t} and {z} {u}.|There are {x} {t} and {z} {u} in {a}'s bag.~",
            "y": "{b} has {y} more {t} than {a}.|{a} has {y} fewer {t} than {b}.~",
        },
        {
            "xy": ("How many {t} does {b} have?|What is the number of {t} of {b}?", "{x} + {y} = {xy}"),
        },
    ),
    World(
        "chain",
        _chain,
        {
            "x": "{a} has {x} {t}.~",
            "d": "{b} has {d} fewer {t} than {a}.|{a} has {d} more {t} than {b}.~",
            "e": "{b} has {e} more {t} than {g}.|{g} has {e} fewer {t} than {b}.~",
        },
        {
            "y": ("How many {t} does {b} have?", "{x} - {d} = {y}"),
            "z": ("How many {t} does {g} have?", "{x} - {d} = {y};{y} - {e} = {z}"),
            "de": (
                "How many more {t} does {a} have than {g}?|How many fewer {t} does {g} have than {a}?",
                "{d} + {e} = {de}",
            ),
        },
    ),
    World(
        "boxes",
        _groups,
        {
            "k": "{a} has {k} {boxes}.|There are {k} {boxes} in the room.|{a} filled {k} {boxes}.~{a} has several {boxes}.",
            "n": "Each of the {boxes} holds {n} {t}.|There are {n} {t} in each of the {boxes}.|{A} put {n} {t} in each.~Each of the {boxes} holds the same number of {t}.",
            "p": "There are {p} {t} in all.|Together they hold {p} {t}.|{A} has {p} {t} altogether.~",
        },
        {
            "p": (
                "How many {t} are there in all?|How many {t} does {a} have altogether?|What is the total number of {t}?",
                "{k} * {n} = {p}",
            ),
            "n": (
                "How many {t} are in each of the {boxes}?|How big is each group of {t}?|How many {t} does each one hold?",
                "{p} / {k} = {n}",
            ),
            "k": (
                "How many {boxes} are there?|How many {boxes} does {a} need?|How many groups of {t} is that?",
                "{p} / {n} = {k}",
            ),
        },
    ),
    World(
        "share",
        _groups,
        {
            "p": "{a} has {p} {t}.|{a} brought {p} {t} to the party.~",
            "k": "{A} shares them equally among {k} {people}.|They are divided into {k} equal groups.|{k} {people} get the same number of them.~",
            "n": "Each one gets {n} {t}.|{A} gives {n} {t} to each person.~",
        },
        {
            "n": ("How many {t} does each one get?|How many {t} are in each group?", "{p} / {k} = {n}"),
            "k": (
                "How many people get {t}?|How many groups can {a} make?",
                "{p} / {n} = {k}",
            ),
        },
    ),
    World(
        "boxes_and_loose",
        _groups_more,
        {
            "k": "{a} has {k} {boxes} of {t}.|There are {k} {boxes} of {t}.~",
            "n": "Each one holds {n} {t}.|In each there are {n} {t}.~",
            "m": "{A} also has {m} loose {t}.|{b} brings {m} more {t}.|Another {m} {t} lie on the table.~",
        },
        {
            "all": (
                "How many {t} are there in all?|What is the total number of {t}?",
                "{k} * {n} = {p};{p} + {m} = {all}",
            )
        },
    ),
    World(
        "boxes_and_gone",
        _groups_less,
        {
            "k": "{a} bought {k} {boxes} of {t}.|{k} {boxes} of {t} arrived.~",
            "n": "Each one held {n} {t}.|There were {n} {t} in each.~",
            "m": "{m} of the {t} were used.|{A} gave {m} {t} to {b}.|{m} {t} were broken.~",
        },
        {"all": ("How many {t} are left?|How many {t} remain?", "{k} * {n} = {p};{p} - {m} = {all}")},
    ),
    World(
        "two_sizes",
        _two_groups,
        {
            "k": "{a} bought {k} {boxes} with {n} {t} each.|{k} {boxes} hold {n} {t} each.~",
            "j": "{A} also bought {j} bigger ones with {m} {t} each.|{j} others hold {m} {t} each.~",
        },
        {
            "all": (
                "How many {t} is that altogether?|How many {t} are there in all?",
                "{k} * {n} = {p};{j} * {m} = {q};{p} + {q} = {all}",
            )
        },
    ),
    World(
        "price",
        _groups,
        {
            "k": "{a} bought {k} {t}.|{a} wants to buy {k} {t}.~{a} bought some {t}.",
            "n": "Each of the {t} costs ${n}.|One costs $ {n}.|The {t} were sold at {n} dollars each.~All {t} have the same price.",
            "p": "{A} paid ${p} in all.|Altogether {a} spent {p} dollars.~",
        },
        {
            "p": (
                "How much did {a} pay?|How many dollars does {a} need?|What is the total cost?",
                "{k} * {n} = {p}",
            ),
            "n": (
                "How much does one of the {t} cost?|How much did each cost?|What is the price of each?",
                "{p} / {k} = {n}",
            ),
            "k": ("How many {t} did {a} buy?|How many {t} did {a} get?", "{p} / {n} = {k}"),
        },
    ),
    World(
        "spend",
        _two_out,
        {
            "s": "{a} had ${s}.|{a} went to the shop with {s} dollars.~{a} went shopping.",
            "c": "{A} spent ${c} on {t}.|The {t} cost {c} dollars.~",
            "h": "{A} spent ${h} on {u}.|The {u} cost {h} dollars.~",
            "e": "~",
        },
        {
            "e": (
                "How much money does {a} have left?|How many dollars are left?",
                "{c} + {h} = {cg};{s} - {cg} = {e}",
            ),
            "cg": (
                "How much did {a} spend on {t} and {u}?|How much did {a} spend in all?",
                "{c} + {h} = {cg}",
            ),
        },
    ),
    World(
        "spend_more",
        _compare,
        {
            "x": "{a} spent ${x} on {t}.|The {t} of {a} cost $ {x}.~",
            "y": "{A} spent ${y} on {u}.|The {u} cost $ {y}.~",
        },
        {
            "d": (
                "How much more did {a} spend on {t} than on {u}?|How much more did the {t} cost than the {u}?|How many dollars cheaper were the {u}?",
                "{x} - {y} = {d}",
            )
        },
    ),
    World(
        "recipe",
        _need,
        {
            "s": "{a} is making {dish}. It takes {s} {cups} of {f1} and {o} {cups} of {f2}.|The recipe for {dish} asks for {s} {cups} of {f1} and {o} {cups} of {f2}.~{a} is making {dish}, which takes {o} {cups} of {f2}.",
            "c": "{A} has put in {c} {cups} of {f1}.|So far {a} has used {c} {cups} of {f1}.~{A} has put in some {f1}.",
            "e": "{A} still needs {e} {cups} of {f1}.~",
        },
        {
            "e": (
                "How many more {cups} of {f1} does {a} need?|How many {cups} of {f1} are still missing?",
                "{s} - {c} = {e}",
            ),
            "c": ("How many {cups} of {f1} did {a} put in?", "{s} - {e} = {c}"),
            "s": ("How many {cups} of {f1} does the recipe take?", "{c} + {e} = {s}"),
        },
    ),
    World(
        "every_day",
        _per_time,
        {
            "n": "{a} {did} {n} {units} every day.|Every day {a} {did} {n} {units}.~{a} {did} the same number of {units} every day.",
            "k": "{A} did so for {k} days.|This went on for {k} days.~",
            "p": "In all it was {p} {units}.|In the end it was {p} {units} altogether.~",
        },
        {
            "p": ("How many {units} is that in all?|What is the total number of {units}?", "{n} * {k} = {p}"),
            "n": ("How many {units} is that per day?|How many {units} was it each day?", "{p} / {k} = {n}"),
            "k": ("How many days did it take?|For how many days did {a} do so?", "{p} / {n} = {k}"),
        },
    ),
    World(
        "rows",
        _groups,
        {
            "k": "In {a}'s garden there are {k} rows of plants.|The hall has {k} rows of seats.~There are rows of seats in the hall.",
            "n": "Each row has {n} of them.|There are {n} in every row.~Each row is equally long.",
            "p": "There are {p} of them altogether.~",
        },
        {
            "p": ("How many are there in all?|What is the total number in all rows?", "{k} * {n} = {p}"),
            "n": ("How many are in each row?", "{p} / {k} = {n}"),
            "k": ("How many rows are there?", "{p} / {n} = {k}"),
        },
    ),
    World(
        "lengths",
        _compare,
        {
            "x": "{a}'s rope is {x} feet long.|The tree near {a}'s house is {x} feet tall.|{a} weighs {x} pounds.~",
            "y": "{b}'s is {y} feet.|The one of {b} measures {y}.~",
            "d": "The other one is {d} less.|{b}'s is {d} less.~",
        },
        {
            "d": ("How much more is that than {b}'s?|What is the difference?", "{x} - {y} = {d}"),
            "y": ("How much is {b}'s?|What is the smaller number?", "{x} - {d} = {y}"),
        },
    ),
    World(
        "goal",
        _change,
        {
            "s": "{a} wants to collect {s} {t}.|{a} has to write {s} {t}.|The goal of {a} is {s} {t}.~",
            "c": "So far {a} has {c}.|{A} already has {c} of them.~",
        },
        {
            "e": (
                "How many more {t} does {a} need?|How many {t} are still missing?|How many {t} are left to do?",
                "{s} - {c} = {e}",
            )
        },
    ),
)
