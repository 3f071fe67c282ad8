"""The import of the heavy libraries, which say less while a verb shows its own progress."""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from algorist.errors import ConfigError

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
        and not {"TORCHELASTIC_RUN_ID", "ALGORIST_STOP_FILE"} & set(values)
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
