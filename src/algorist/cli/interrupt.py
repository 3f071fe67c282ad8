"""What is said when Ctrl-C ends a run: what is saved, and the command that goes on."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from algorist.cli.program import program
from algorist.errors import CheckpointError
from algorist.store.stages import STAGES, checkpoints

if TYPE_CHECKING:
    from algorist.store.run_folder import RunFolder


class Stopped(Exception):
    """Ctrl-C ended a verb: exit code 130; the message, if any, says what is kept and how to go on."""


def command_again(*, resume: bool) -> str:
    """Return the command of this process, with ``--resume`` (before a ``--``) or without it."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    if resume:
        place = words.index("--") if "--" in words else len(words)
        words.insert(place, "--resume")
    return f"{program()} {shlex.join(words)}"


def stopped_at_once(run: Path | None) -> str:
    """Return one line for a run that ended in the middle of something: what ``run`` keeps and how to go on.

    None stands for a run that this command has not touched.
    """
    from algorist.store.run_folder import RunFolder

    folder = RunFolder(run) if run else None
    if folder is None or not folder.config.is_file() or not folder.has_begun():
        there = f" ({run} holds only its settings)" if folder and folder.config.is_file() else ""
        return f"stopped before the first training step: nothing was trained{there}. Start again: " + (
            command_again(resume="--resume" in sys.argv)
        )
    kept = _kept(folder)
    if not kept:
        return (
            f"stopped before the first checkpoint: nothing that was trained is kept in {run}. "
            f"Begin again there: {command_again(resume=True)}"
        )
    return (
        f"stopped at once; {run} keeps {', '.join(kept)}, what came after is done again. "
        f"Continue: {command_again(resume=True)}"
    )


def _kept(folder: RunFolder) -> list[str]:
    """Return the finished stages, and the newest checkpoint of each stage that is not finished."""
    try:
        finished = list(folder.stages())
    except CheckpointError:
        finished = []
    found = [f"finished {stage}" for stage in finished]
    for stage in STAGES:
        saved = checkpoints(folder.path / stage)
        if saved and stage not in finished:
            found.append(f"{stage}/{saved[0].name}")
    return found
