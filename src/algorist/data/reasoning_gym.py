"""The generators of the package ``reasoning-gym`` (extra ``reasoning-gym``), graded by its own ``score_answer``.

Source: Reasoning Gym (2505.24760). Some of its scorers evaluate the answer as Python, so they run in a worker process with limits
that may neither write files nor start processes nor open connections.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from algorist.data.base import Split, draw_distinct, generated, id_of, is_held_out
from algorist.errors import DataError, MissingExtraError, check_known
from algorist.types import Problem
from algorist_grader import checker

Settings = dict[str, Any]
NO_ANSWER = "any that reasoning-gym accepts"
_TRIES = 100
"""Problems made per problem asked for, at most."""
_MISSES = 3000
"""Repeated problems in a row after which the generator has no more."""
_FORBIDDEN = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "signal.")
_HARMLESS = ("os.listdir", "os.scandir", "os.walk")
_guarded = False


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
    gym = _package()
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


def _package() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise MissingExtraError(
            f"dataset 'reasoning_gym' needs the package reasoning-gym ({error}); pip install 'algorist[reasoning-gym]'"
        ) from None
    return reasoning_gym


@checker("reasoning_gym", isolated=True)
def reasoning_gym(problem: Mapping[str, Any], answer: str) -> bool:
    """Whether reasoning-gym gives the answer its full score; partial scores are not right."""
    scorer = _scorer(problem["generator"])
    _guard()
    return bool(scorer(answer, ast.literal_eval(problem["entry"])) >= 1.0)


@cache
def _scorer(generator: str) -> Any:
    return _package().get_score_answer_fn(generator)


def _guard() -> None:
    """From now on this process may read and compute, nothing else; a hook cannot be taken back."""
    global _guarded
    if not _guarded:
        _guarded = True
        sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if writes or (event.startswith(_FORBIDDEN) and event not in _HARMLESS):
        raise PermissionError(f"an answer tried {event}")
