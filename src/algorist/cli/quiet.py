"""The import of the heavy libraries, which say less while a verb shows its own progress."""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable


def import_quietly(module: str, say: Callable[[str], None] | None = None) -> None:
    """Import what a verb needs, and keep the libraries' notes out of the live display; their errors still show.

    What imports make lives to the end of the process: it is kept out of garbage collections, during the imports and after.

    Args:
        module: What to import.
        say: Is told of the seconds that importing takes, so that a pipe, too, hears something at once.
    """
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


def _unfreeze() -> None:
    """Let the last collection see everything where Triton needs it: its binding prints what was not collected, page by page."""
    if "triton" in sys.modules:
        gc.unfreeze()
