"""Procedural word problems in the manner of elementary-school collections: varied stories, unknowns and needless numbers.

A problem takes one of the ``WORLDS``, draws its numbers, tells all facts but the asked one, and often adds a number that
nothing asks for. Train and test share no triple of world, unknown and numbers, decided by a hash. The solution is one
equation per line, the last of which gives the answer.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

from algorist.data.base import Source, dataset
from algorist.data.story_worlds import WORLDS, World, size
from algorist.errors import DataError, nearest
from algorist.types import Problem

HE = "Adam Ben Carlos David Edward Frank George Henry Ivan Jack Kevin Luis Mark Noah Oscar Paul Robert Sam Tom Victor".split()
SHE = "Alice Bella Clara Diana Emma Fatima Grace Hannah Irene Julia Kate Laura Maria Nina Olga Paula Rosa Sara Tina Vera".split()
THINGS = (
    "apples oranges books coins stickers marbles pencils shells eggs cookies cards stamps flowers toys balls bottles "
    "candies crayons photos buttons peaches muffins games magazines letters bananas pens stones tickets action_figures "
    "bottle_caps video_games"
).split()
COLOURS = "red blue green yellow black white small large old new round heavy".split()
BOXES = "boxes bags baskets jars shelves crates packs albums drawers trays bins folders".split()
PEOPLE = "children students friends players visitors people guests girls boys workers".split()
PLACES = "in the park|on the bus|at the party|in the library|in the classroom|on the playground|at the museum".split(
    "|"
)
DOINGS = "read:pages|ran:miles|wrote:letters|baked:cakes|drank:bottles of water|made:bracelets|walked:blocks|did:push-ups|picked:pounds of berries|solved:puzzles|watched:episodes|sold:tickets|planted:trees".split(
    "|"
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
DISHES = "a cake|bread|pancakes|a pie|soup|cookies".split("|")
FOODS = "flour sugar butter milk rice oats salt".split()
NEEDLESS = (
    "{b} has {w} {v}.|{a} also has {w} {v}.|It took {a} {w} days.|{a} is {w} years old.|There are {w} {v} on the table.|"
    "Last year {b} had {w} {v}.|{b} lives {w} miles away.|{a} has {w} friends.|{w} of {b}'s {v} are {c2}.|Each of the {v} costs {w} dollars."
).split("|")
MAX_ANSWER = 1000


def story_problems(
    count: int, *, seed: int = 0, split: str = "train", needless: float = 0.4, kinds: tuple[str, ...] = ()
) -> list[Problem]:
    """Return ``count`` problems with distinct texts, in a fixed order for a given seed and split.

    Args:
        count: Number of problems.
        seed: Any integer.
        split: ``train`` or ``test``; no world has the same numbers and unknown in both.
        needless: Probability in [0, 1] that a number is told which nothing asks for.
        kinds: Names of worlds to draw from; all when empty.

    Raises:
        DataError: Unknown split or kind, or a probability outside [0, 1].
    """
    if split not in ("train", "test"):
        raise DataError(f"story_problems has no split '{split}'; expected 'train' or 'test'")
    if not 0 <= needless <= 1:
        raise DataError(f"story_problems: needless is {needless}; expected a probability in [0, 1]")
    known = [world.kind for world in WORLDS]
    for kind in kinds:
        if kind not in known:
            raise DataError(
                f"story_problems has no kind '{kind}'.{nearest(kind, known)} Expected: {', '.join(known)}"
            )
    worlds = [world for world in WORLDS if not kinds or world.kind in kinds]
    stream = _stream(random.Random(f"{seed}/{split}"), split == "test", needless, worlds)
    problems: dict[str, Problem] = {}
    for _ in range(100 * count + 1000):
        if len(problems) >= count:
            return list(problems.values())
        problem = next(stream)
        problems.setdefault(problem.question, problem)
    raise DataError(f"story_problems found only {len(problems)} distinct problems of {count}; ask for fewer")


@dataset("story_problems")
def load_story_problems(source: Source) -> list[Problem]:
    """Varied word problems; params: ``count`` (1000), ``seed`` (0), ``needless`` (0.4), ``kinds`` (all)."""
    if source.path is not None or source.hub is not None:
        raise DataError(
            "story_problems makes its problems and reads nothing, but data.….path or hub is set; take name=local for rows of "
            "your own"
        )
    valid = ("count", "seed", "needless", "kinds")
    for key in source.params:
        if key not in valid:
            raise DataError(
                f"story_problems: data.….params has the key '{key}'.{nearest(key, valid)} Expected: {', '.join(valid)}"
            )
    params: dict[str, Any] = {"count": 1000, "seed": 0, "needless": 0.4, "kinds": ()} | source.params
    return story_problems(
        int(params["count"]),
        seed=int(params["seed"]),
        split=source.split,
        needless=float(params["needless"]),
        kinds=tuple(params["kinds"]),
    )


def _stream(rng: random.Random, test: bool, needless: float, worlds: list[World]) -> Iterator[Problem]:
    while True:
        world = rng.choice(worlds)
        numbers = world.draw(rng)
        asked = rng.choice(list(world.asked))
        if max(numbers.values()) > MAX_ANSWER:
            continue
        drawn = f"{world.kind}/{asked}/{sorted(numbers.items())}"
        if (int(hashlib.sha256(drawn.encode()).hexdigest(), 16) % 10 == 0) != test:
            continue
        question = _tell(rng, world, numbers, asked, needless)
        steps = world.asked[asked][1].format(**numbers).split(";")
        yield Problem(
            id=hashlib.sha256(question.encode()).hexdigest()[:12],
            question=question,
            answer=str(numbers[asked]),
            solution="\n".join(steps),
            subject=world.kind,
            level=str(len(steps)),
        )


def _words(rng: random.Random) -> dict[str, str]:
    men = rng.random() < 0.5
    a = rng.choice(HE if men else SHE)
    b, g = rng.sample([name for name in HE + SHE if name != a], 2)
    t, u, v = (word.replace("_", " ") for word in rng.sample(THINGS, 3))
    c1, c2 = rng.sample(COLOURS, 2)
    did, units = rng.choice(DOINGS).split(":")
    d1, d2, d3 = rng.sample(DAYS, 3)
    f1, f2 = rng.sample(FOODS, 2)
    words = {"a": a, "b": b, "g": g, "A": rng.choice((a, "He" if men else "She")), "t": t, "u": u, "v": v}
    words |= {"c1": c1, "c2": c2, "boxes": rng.choice(BOXES), "people": rng.choice(PEOPLE)}
    words |= {"place": rng.choice(PLACES), "did": did, "units": units, "d1": d1, "d2": d2, "d3": d3}
    return words | {
        "f1": f1,
        "f2": f2,
        "dish": rng.choice(DISHES),
        "cups": rng.choice(("cups", "spoons", "ounces")),
    }


def _tell(rng: random.Random, world: World, numbers: dict[str, int], asked: str, needless: float) -> str:
    """Return the story without the asked quantity, then the question."""
    needed = {key for key in world.facts if f"{{{key}}}" in world.asked[asked][1] and key != asked}
    words, sentences = _words(rng) | {"w": str(size(rng, 90))}, []
    for key, fact in world.facts.items():
        told, _, otherwise = fact.partition("~")
        spare = world.kind in ("three_days", "two_kinds") and rng.random() < 0.7
        if key in needed or (spare and key != asked):
            sentences.append(rng.choice(told.split("|")).format(**words, **numbers))
        elif otherwise:
            sentences.append(rng.choice(otherwise.split("|")).format(**words, **numbers))
    if rng.random() < needless:
        place = rng.randint(1, len(sentences))
        sentences.insert(place, rng.choice(NEEDLESS).format(**words))
    question = rng.choice(world.asked[asked][0].split("|")).format(**words, **numbers)
    if rng.random() < 0.15:  # the last sentence as a condition: "If …, how many …"
        last = sentences.pop()
        first = last.split(" ", 1)[0]
        head = last if first in HE + SHE or first.isdigit() else last[0].lower() + last[1:]
        question = f"If {head.rstrip('.')}, {question[0].lower()}{question[1:]}"
    return " ".join([*sentences, question])
