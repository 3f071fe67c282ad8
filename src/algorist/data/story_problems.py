"""Procedural word problems in the manner of elementary-school collections: varied stories, unknowns and needless numbers.

A problem takes one of the worlds of ``story_worlds.yaml``, draws its numbers, tells all facts but the asked one, and often adds a number that
nothing asks for. Train and test share no triple of world, unknown and numbers, decided by a hash. The solution is one
equation per line, the last of which gives the answer.
"""

from __future__ import annotations

import random
import re

from algorist.data.base import Source, dataset, draw_distinct, id_of, is_held_out, params_of
from algorist.data.story_worlds import World, size, story_words, story_worlds
from algorist.errors import DataError, nearest
from algorist.types import Problem

MAX_ANSWER = 1000
_NAMES = re.compile(r"{(\w+)}")


def story_problems(
    count: int,
    *,
    seed: int = 0,
    split: str = "train",
    needless: float = 0.4,
    traps: bool = False,
    kinds: tuple[str, ...] = (),
) -> list[Problem]:
    """Return ``count`` problems with distinct texts, in a fixed order for a given seed and split.

    Args:
        count: Number of problems.
        seed: Any integer.
        split: ``train`` or ``test``; no world has the same numbers and unknown in both.
        needless: Probability in [0, 1] that a number is told which nothing asks for.
        traps: Also take the worlds whose stories mislead: numbers of other things, in any order.
        kinds: Names of worlds to draw from; all when empty.

    Raises:
        DataError: Unknown split or kind, or a probability outside [0, 1].
    """
    if split not in ("train", "test"):
        raise DataError(f"story_problems has no split '{split}'; expected 'train' or 'test'")
    if not 0 <= needless <= 1:
        raise DataError(f"story_problems: needless is {needless}; expected a probability in [0, 1]")
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


@dataset("story_problems")
def load_story_problems(source: Source) -> list[Problem]:
    """Varied word problems; params: ``count`` (1000), ``seed`` (0), ``needless`` (0.4), ``traps`` (false), ``kinds`` (all)."""
    known = {"count": 1000, "seed": 0, "needless": 0.4, "traps": False, "kinds": ()}
    params = params_of(source, "story_problems", known)
    return story_problems(split=source.split, **params)


def _problem(rng: random.Random, test: bool, needless: float, worlds: list[World]) -> Problem | None:
    """Draw a problem; None when its numbers are too large or it belongs to the other split."""
    world = rng.choice(worlds)
    numbers = world.draw(rng)
    asked = rng.choice(list(world.unknowns))
    if max(numbers.values()) > MAX_ANSWER:
        return None
    if is_held_out(f"{world.kind}/{asked}/{sorted(numbers.items())}") != test:
        return None
    question = _tell(rng, world, numbers, asked, needless)
    steps = [step.format(**numbers) for step in world.unknowns[asked]["steps"]]
    return Problem(
        id=id_of(question),
        question=question,
        answer=str(numbers[asked]),
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
    sentence |= {
        "c1": c1,
        "c2": c2,
        "did": did,
        "units": units,
        "d1": d1,
        "d2": d2,
        "d3": d3,
        "f1": f1,
        "f2": f2,
    }
    lists = {"boxes": "boxes", "people": "people", "place": "places", "dish": "dishes", "cups": "cups"}
    return sentence | {name: rng.choice(words[listed]) for name, listed in lists.items()}


def _tell(rng: random.Random, world: World, numbers: dict[str, int], asked: str, needless: float) -> str:
    """Return the story without the asked quantity, then the question."""
    questions, needed = world.unknowns[asked]["questions"], _needed(world.unknowns[asked]["steps"])
    words, sentences = _words(rng) | {"w": str(size(rng, 90))}, []
    for key, fact in world.facts.items():
        spare = world.spare > 0 and rng.random() < world.spare
        if key != asked and (spare or needed & set(_NAMES.findall(fact["known"][0]))):
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
