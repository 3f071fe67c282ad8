"""The generators of the package ``reasoning-gym`` (extra ``reasoning-gym``), graded by its own ``score_answer``.

Source: Reasoning Gym (2505.24760).
"""

from __future__ import annotations

from typing import Any

from algorist.data.base import id_of
from algorist.errors import DataError, check_known
from algorist.extensions.problem_sets.made import Split, draw_distinct, generated, is_held_out
from algorist.types import Problem
from algorist_grader.reasoning_gym import package

Settings = dict[str, Any]
NO_ANSWER = "any that reasoning-gym accepts"
_TRIES = 100
"""Problems made per problem asked for, at most."""
_MISSES = 3000
"""Repeated problems in a row after which the generator has no more."""


@generated("reasoning_gym")
def reasoning_gym_problems(
    generator: str = "",
    *,
    count: int = 1000,
    seed: int = 0,
    split: Split = "train",
    config: Settings | None = None,
) -> list[Problem]:
    """Problems of one reasoning-gym generator; params: ``generator``, ``count`` (1000), ``seed`` (0), ``config`` (its own settings).

    The solution is the answer, so that SFT teaches the form; problems that reasoning-gym gives no answer for have none. Train and
    test share no question, decided by a hash.
    """
    made = _make(generator, seed, _TRIES * count, config or {})
    numbers = iter(range(_TRIES * count))

    def draw() -> Problem | None:
        entry = made[number] if (number := next(numbers, None)) is not None else {"question": ""}
        question = str(entry["question"]).strip()
        if not question or is_held_out(question) != (split == "test"):
            return None
        answer = str(entry["answer"] or "").strip()
        return Problem(
            id=id_of(question),
            question=question,
            answer=answer or NO_ANSWER,
            solution=answer,
            subject=generator,
            extra={"generator": generator, "entry": repr(dict(entry))},
            checker="reasoning_gym",
        )

    advice = f" of {generator} (params.count), or widen its settings (params.config)"
    return draw_distinct(draw, count, "reasoning_gym", advice, _MISSES)


def _make(name: str, seed: int, size: int, config: Settings) -> Any:
    """Return a generator's dataset.

    Raises:
        DataError: Unknown generator or setting, or a value that it refuses.
        MissingExtraError: The package is not installed.
    """
    gym = package()
    known = sorted(gym.factory.DATASETS)
    said = f"reasoning_gym: data.….params.generator is {name or 'missing'!r}"
    check_known(name, known, said, "Expected one of: {}", DataError)
    valid = [key for key in gym.factory.DATASETS[name][1].__dataclass_fields__ if key not in ("seed", "size")]
    for key in config:
        check_known(key, valid, f"reasoning_gym: {name} has no setting '{key}'", kind=DataError)
    try:
        return gym.create_dataset(name, seed=seed, size=size, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"reasoning_gym: {name} refuses its settings {config}: {error}") from None
