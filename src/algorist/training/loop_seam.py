"""Every private name of transformers that algorist touches, in one place; ``tests/contract/test_loop_seam.py`` pins them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

RECOMPUTE = "_gradient_checkpointing_func"
PRIVATE_NAMES = {
    "_save_checkpoint": "transformers.Trainer, overridden: a checkpoint is written beside its place, then moved there",
    "_load_from_checkpoint": "transformers.Trainer, called: the weights of a checkpoint of the last step",
    RECOMPUTE: "transformers' layers, wrapped: a recomputed layer knows the packed row (shared_prefix.py)",
}


class SavesCheckpoints:
    """The override of ``_save_checkpoint``: hands the library's own writing to ``save_whole``."""

    saving: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    """Makes the context in which a checkpoint is written."""

    def save_whole(self, write: Callable[[], None]) -> None:
        """Write a checkpoint by ``write`` so that it is whole or not there."""
        raise NotImplementedError

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        write = super()._save_checkpoint  # type: ignore[misc]
        with self.saving():
            self.save_whole(lambda: write(model, trial))


def load_weights(trainer: Any, checkpoint: Path) -> None:
    trainer._load_from_checkpoint(str(checkpoint))
