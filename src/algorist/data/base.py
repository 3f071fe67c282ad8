"""What a dataset adapter is: a named function from a source (hub name or local path) to problems."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from algorist.errors import DataError, nearest
from algorist.registry import Registry
from algorist.types import Problem


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
    """Return the params of an adapter that makes its problems: those of ``source`` over ``defaults``.

    Raises:
        DataError: A path or a hub name, another split than train and test, or an unknown key.
    """
    if source.path is not None or source.hub is not None:
        raise DataError(
            f"{name} makes its problems and reads nothing, but data.….path or hub is set; take {instead}"
        )
    if source.split not in ("train", "test"):
        raise DataError(f"{name} has no split '{source.split}'; expected 'train' or 'test'")
    refuse_unknown(source.params, defaults, name)
    return defaults | source.params


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
