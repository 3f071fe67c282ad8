"""What a dataset adapter is: a named function from a source (hub name or local path) to problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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


Adapter = Callable[[Source], list[Problem]]
DATASETS: Registry[Adapter] = Registry("dataset")
dataset = DATASETS.register
