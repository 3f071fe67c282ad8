"""Registries for ``algorist eval``: ``@exporter`` for ``--export NAME FOLDER``, ``@probe`` for ``--probe NAME``;
and for ``algorist compare``: ``@importer`` with the names of the files that it reads, ``@breakdown`` for ``--parts``.

Light: what they need is imported when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algorist.types import Problem
from algorist_grader.registry import Registry

if TYPE_CHECKING:
    from algorist.evaluation.artifact import Artifact
    from algorist.evaluation.estimators import Interval
    from algorist.rollouts.base import RolloutEngine


@dataclass(frozen=True)
class Probed:
    """Results of a probe: ``values`` are plain data, ``rows`` has every completion, ``lines`` are for the terminal."""

    values: dict[str, Any]
    rows: list[dict[str, Any]]
    lines: list[str]


EXPORTED = (
    "greedy", "sample", "correct", "lenient", "well_formed", "truncated", "has_reasoning", "reasoning_characters", "completion_tokens",
    "reward", "rewards", "extracted", "reason", "subject", "level",
)  # fmt: skip
"""Columns of a completion that an export keeps, so that what is read back is compared as the original."""
Exporter = Callable[["Artifact", Path, str], Path]
"""Called with an evaluation, a folder and the name of the task; writes its samples there and returns the file."""
Probe = Callable[["RolloutEngine", Any, Sequence[Problem], Callable[[int, int], None] | None], Probed]
"""Called with an engine, its tokenizer, problems, and what takes the problems done and in all."""
EXPORTERS: Registry[Exporter] = Registry("export")
PROBES: Registry[Probe] = Registry("probe")
exporter, probe = EXPORTERS.register, PROBES.register


@dataclass(frozen=True)
class Foreign:
    """An evaluation that another program made.

    Attributes:
        task: Name of the task, for tables.
        model: Its model.
        rows: One for each scored completion: ``problem_id``, ``question``, ``gold``, ``completion``, and ``scores``: name → number, None
            where it was not scored. Rows with ``greedy`` are taken for algorist's own.
        protocol: How it was made, as far as the file says.
    """

    task: str
    model: str
    rows: list[dict[str, Any]]
    protocol: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Importer:
    """``read`` returns the evaluation in a file whose name fits one of ``patterns``; it raises DataError."""

    patterns: tuple[str, ...]
    read: Callable[[Path], Foreign]


IMPORTERS: Registry[Importer] = Registry("import")


def importer(name: str, *patterns: str) -> Callable[[Callable[[Path], Foreign]], Callable[[Path], Foreign]]:
    """Register a reader of other programs' evaluations, for files such as ``*.eval``."""

    def register(read: Callable[[Path], Foreign]) -> Callable[[Path], Foreign]:
        IMPORTERS.register(name)(Importer(patterns, read))
        return read

    return register


@dataclass(frozen=True)
class GainPart:
    """One reason of wrong answers: its share of all problems before and after, and what the gain in accuracy owes to it."""

    before: float
    after: float
    gain: Interval
    total: bool = False
    """Several reasons in one."""


Breakdown = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], dict[str, GainPart]]
"""Called with the rows of two evaluations of the same problems; returns parts that add up to the difference of their accuracies."""
BREAKDOWNS: Registry[Breakdown] = Registry("breakdown")
breakdown = BREAKDOWNS.register
