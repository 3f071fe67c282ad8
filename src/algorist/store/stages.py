"""The stages of a run: each one's name is its folder in the run, its section in the recipe and its evaluation's name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from safetensors import SafetensorError, safe_open

Stage = Literal["sft", "grpo"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""In the order in which they are done."""
LAST_FIRST: tuple[Stage, ...] = STAGES[::-1]
EVALUATED = ("base", *STAGES)
"""Names of the evaluations between the stages; ``base`` is the model before any of them."""

STOP_FILE = "ALGORIST_STOP_FILE"
"""Variable by which a launcher names the file that stops its processes after the present step."""
START = "start"
"""Folder, in a stage's, of the policy that it began with, where that is evaluated too."""


def checkpoints(stage: Path) -> list[Path]:
    """Return the ``checkpoint-N`` folders of a stage, newest first, damaged ones included."""
    folders = [p for p in stage.glob("checkpoint-*") if p.is_dir() and p.name.rpartition("-")[2].isdecimal()]
    return sorted(folders, key=step_of, reverse=True)


def lost_model(run: Path, stage: str) -> bool:
    """Whether a finished stage's model is gone or cut short, and no later stage has one."""
    later = STAGES[STAGES.index(stage) :] if stage in STAGES else ()  # type: ignore[arg-type]
    return bool(later) and not any(_is_whole(run / name / "final") for name in later)


def _is_whole(final: Path) -> bool:
    """Whether a folder is there, and each file of weights in it as long as it says."""
    try:
        for path in final.glob("*.safetensors"):
            safe_open(path, framework="np")
    except (SafetensorError, OSError):
        return False
    return final.is_dir()


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps that a checkpoint was made after."""
    return int(checkpoint.name.rpartition("-")[2])
