"""Libraries that say less while a verb shows its own progress."""

from __future__ import annotations

import logging
import os
import warnings


def quiet_libraries() -> None:
    """Keep the libraries' notes out of the live display; warnings and errors still show."""
    for name in ("transformers", "trl", "datasets", "accelerate", "torch.distributed.elastic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
