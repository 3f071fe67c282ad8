"""A run becomes an ``Outcome``: its evaluations, what changed between the last two, its report, and what to do next."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algorist.evaluation.artifact import Artifact, read_artifact
from algorist.evaluation.compare import paired_metrics
from algorist.evaluation.console import solved_question
from algorist.report.build import build_report
from algorist.report.results import write_result
from algorist.store.safe_text import printable
from algorist.store.stages import EVALUATED

if TYPE_CHECKING:
    from algorist.runs.pipeline import Run


@dataclass(frozen=True)
class Outcome:
    """Outcome of a finished run.

    Attributes:
        folder: The run's folder.
        report: Its page.
        artifacts: Base, SFT, GRPO → the evaluation, where there is one.
        differences: Of the last two evaluations, paired: metric → interval.
        next: Commands.
    """

    folder: Path
    report: Path
    artifacts: dict[str, Artifact]
    differences: dict[str, Any]
    next: list[str]

    @classmethod
    def of(cls, run: Run) -> Outcome:
        """Read the results of a finished run; write its summary and its report."""
        folder = run.folder.path
        names = [s for s in EVALUATED if (folder / "eval" / f"{s}.json").is_file()]
        artifacts = {name: read_artifact(folder / "eval", name) for name in names}
        last = [artifact.samples for artifact in artifacts.values()][-2:]
        write_result(run.folder, run.recipe, artifacts, run.plan.draft.took)
        return cls(
            folder,
            build_report(folder),
            artifacts,
            paired_metrics(*last) if names[1:] else {},
            [f"algorist {command}" for command in _next(run, names, last)],
        )


def _next(run: Run, names: list[str], last: list[list[dict[str, Any]]]) -> list[str]:
    folder = run.folder.path
    solved = solved_question(last[-1]) if last else None
    question = solved or min((p.question for p in run.held_out or run.train), key=len)
    typed = shlex.quote(str(folder))
    commands = [f"solve {shlex.quote(printable(question))} --model {typed}"]
    commands += [f"inspect {typed} --sort=-reward"] if list((folder / "rollouts").glob("*.parquet")) else []
    commands += [f"compare {typed}/eval/{names[-2]}.json {typed}/eval/{names[-1]}.json"] if names[1:] else []
    return commands
