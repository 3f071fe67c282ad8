"""What a dataset adapter is: a named function from a source (hub name or local path) to problems."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from algorist.errors import DataError, nearest
from algorist.registry import Registry
from algorist.types import Problem

_MISSES = 20_000


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows come from.

    ``path`` (a file or folder) wins over ``hub`` (``owner/name``). ``columns`` maps our names (question, answer,
    solution, subject, level, id) to the columns of the file. ``params`` are adapter-specific.
    """

    split: str = "train"
    path: str | None = None
    hub: str | None = None
    subset: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)


def params_of(
    source: Source, name: str, defaults: dict[str, Any], instead: str = "name=local for rows of your own"
) -> dict[str, Any]:
    """Return the params of an adapter that makes its problems: those of ``source`` over ``defaults``, which say the types.

    Raises:
        DataError: A path or a hub name, another split than train and test, an unknown key, or a value of another type.
    """
    if source.path is not None or source.hub is not None:
        raise DataError(
            f"{name} makes its problems and reads nothing, but data.….path or hub is set; take {instead}"
        )
    if source.split not in ("train", "test"):
        raise DataError(f"{name} has no split '{source.split}'; expected 'train' or 'test'")
    refuse_unknown(source.params, defaults, name)
    read = dict(defaults)
    for key, value in source.params.items():
        kind: Any = type(defaults[key])
        if kind is tuple:
            kind = tuple[type(defaults[key][0]) if defaults[key] else str, ...]  # type: ignore[misc]
        try:
            read[key] = TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            raise DataError(
                f"{name}: data.….params.{key} is {value!r}. {error.errors()[0]['msg']}, such as {defaults[key]!r}"
            ) from None
    return read


def draw_distinct(draw: Callable[[], Problem | None], count: int, name: str, advice: str) -> list[Problem]:
    """Return ``count`` problems with different texts out of what ``draw`` makes; None is a draw without a problem.

    Raises:
        DataError: The last 20,000 draws made no new problem: there are no more; ``advice`` says what else to change.
    """
    problems: dict[str, Problem] = {}
    misses = 0
    while len(problems) < count:
        problem, misses = draw(), misses + 1
        if problem is not None and problem.question not in problems:
            problems[problem.question], misses = problem, 0
        if misses == _MISSES:
            raise DataError(
                f"{name} found only {len(problems)} distinct problems of {count}; ask for fewer{advice}"
            )
    return list(problems.values())


def refuse_unknown(params: Iterable[str], valid: Collection[str], where: str) -> None:
    """Raise DataError for the first key of ``params`` that is not among ``valid``."""
    for key in params:
        if key not in valid:
            raise DataError(
                f"{where}: data.….params has the key '{key}'.{nearest(key, valid)} Expected: {', '.join(valid)}"
            )


def id_of(question: str) -> str:
    """Return the id of a problem whose rows name none: 12 hexadecimal digits of its question's hash."""
    return hashlib.sha256(question.encode()).hexdigest()[:12]


def is_held_out(text: str, one_in: int = 10) -> bool:
    """Return whether a hash puts ``text`` into the test split, as it does one text in ``one_in``."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % one_in == 0


Adapter = Callable[[Source], list[Problem]]
DATASETS: Registry[Adapter] = Registry("dataset")
dataset = DATASETS.register
