"""What ``algorist eval`` does beside evaluating, by name: ``@exporter`` for ``--export NAME FOLDER``, ``@probe`` for ``--probe NAME``.

Light: what they need is imported when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algorist.registry import Registry
from algorist.types import Problem

if TYPE_CHECKING:
    from algorist.evaluation.artifact import Artifact
    from algorist.rollouts.base import RolloutEngine


@dataclass(frozen=True)
class Probed:
    """What a probe saw: ``values`` are plain data, ``rows`` has every completion, ``lines`` are for the terminal."""

    values: dict[str, Any]
    rows: list[dict[str, Any]]
    lines: list[str]


Exporter = Callable[["Artifact", Path, str], Path]
"""Called with an evaluation, a folder and the name of the task; writes its samples there and returns the file."""
Probe = Callable[["RolloutEngine", Any, Sequence[Problem], Callable[[int, int], None] | None], Probed]
"""Called with an engine, its tokenizer, problems, and what takes the problems done and in all."""
EXPORTERS: Registry[Exporter] = Registry("export")
PROBES: Registry[Probe] = Registry("probe")
exporter, probe = EXPORTERS.register, PROBES.register
