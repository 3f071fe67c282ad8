"""The process of a verb: quiet imports of the heavy libraries, and what is said when Ctrl-C ends it."""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from algorist.errors import CheckpointError, ConfigError
from algorist.store.stages import STAGES, STOP_FILE, checkpoints

if TYPE_CHECKING:
    from algorist.store.run_folder import RunFolder

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_PRECISION = "ACCELERATE_MIXED_PRECISION"


def import_quietly(module: str, say: Callable[[str], None] | None = None) -> None:
    """Import what a verb needs, and keep the libraries' notes out of the live display; their errors still show.

    What imports make lives to the end of the process: it is kept out of garbage collections, during the imports and after.

    Args:
        module: What to import.
        say: Is told of the seconds that importing takes, so that a pipe, too, hears something at once.
    """
    _check_environment(say)
    if say and "torch" not in sys.modules:
        say("loading torch and transformers …")
        sys.stdout.flush()
    for name in (
        "transformers",
        "trl",
        "datasets",
        "accelerate",
        "torch.distributed.elastic",
        "bitsandbytes",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if module not in sys.modules:
        gc.disable()
        try:
            importlib.import_module(module)
        finally:
            gc.enable()
        gc.freeze()
        atexit.register(_unfreeze)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _check_environment(say: Callable[[str], None] | None) -> None:
    """Refuse variables that torch and accelerate would fail over later; say where they make this process wait for others.

    Raises:
        ConfigError: The variable, its value, and how to take it away.
    """
    values = os.environ
    wrong = [name for name in _NUMBERS if not values.get(name, "0").isdecimal()]
    wrong += [name for name in (_PRECISION,) if values.get(name, "no") not in ("no", "fp16", "bf16", "fp8")]
    if not wrong and int(values.get("RANK", "0")) >= max(1, int(values.get("WORLD_SIZE", "1"))):
        wrong = ["RANK"]
    if wrong:
        expected = "no, fp16, bf16 or fp8" if wrong[0] == _PRECISION else "a number (RANK below WORLD_SIZE)"
        raise ConfigError(
            f"the environment has {wrong[0]}={values[wrong[0]]!r}; expected {expected}. A launcher or a cluster may have left it: "
            f"unset {' '.join(name for name in (*_NUMBERS, _PRECISION) if name in values)}"
        )
    if sys.flags.optimize > 1:
        raise ConfigError(
            "Python runs without docstrings (-OO or PYTHONOPTIMIZE=2), which transformers reads: unset PYTHONOPTIMIZE"
        )
    if (
        say
        and int(values.get("WORLD_SIZE", "1")) > 1
        and not {"TORCHELASTIC_RUN_ID", STOP_FILE} & set(values)
    ):
        say(
            f"process {values.get('RANK', '0')} of {values['WORLD_SIZE']} (RANK, WORLD_SIZE): waits until all have met at "
            f"{values.get('MASTER_ADDR', 'localhost')}:{values.get('MASTER_PORT', '29500')}. If a cluster has left these variables: "
            f"unset {' '.join(name for name in _NUMBERS if name in values)}"
        )


def _unfreeze() -> None:
    """Let the last collection see everything where Triton needs it: its binding prints what was not collected, page by page."""
    if "triton" in sys.modules:
        gc.unfreeze()


@contextmanager
def without_warnings() -> Iterator[None]:
    """Log no warnings meanwhile: what they would say is shown otherwise."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class Stopped(Exception):
    """Ctrl-C ended a verb: exit code 130; the message, if any, says what is kept and how to go on."""


def command_again(*, resume: bool) -> str:
    """Return the command of this process, with ``--resume`` (before a ``--``) or without it, for ``say``."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    if resume:
        place = words.index("--") if "--" in words else len(words)
        words.insert(place, "--resume")
    return f"algorist {shlex.join(words)}"


def stopped_at_once(run: Path | None) -> str:
    """Return one line for a run that ended in the middle of something: what ``run`` keeps and how to go on.

    None is a run that this command has not touched.
    """
    from algorist.store.run_folder import RunFolder

    folder = RunFolder(run) if run else None
    if folder is None or not folder.config.is_file() or not folder.has_begun():
        only = f" ({run} holds only its settings)" if folder and folder.config.is_file() else ""
        return f"stopped before the first training step: nothing was trained{only}. Start again: " + (
            command_again(resume="--resume" in sys.argv)
        )
    saved = _saved(folder)
    if not saved:
        return (
            f"stopped before the first checkpoint: nothing that was trained is kept in {run}. "
            f"Begin again there: {command_again(resume=True)}"
        )
    return (
        f"stopped at once; {run} keeps {', '.join(saved)}, what came after is done again. "
        f"Continue: {command_again(resume=True)}"
    )


def _saved(folder: RunFolder) -> list[str]:
    """Return the finished stages, and the newest checkpoint of each stage that is not finished."""
    try:
        finished = list(folder.stages())
    except CheckpointError:
        finished = []
    names = [f"finished {stage}" for stage in finished]
    for stage in STAGES:
        newest = next(iter(checkpoints(folder.path / stage)), None)
        if newest is not None and stage not in finished:
            names.append(f"{stage}/{newest.name}")
    return names
