"""Every private name of transformers and TRL that algorist touches, in one place; ``tests/contract/test_trl_seam.py`` pins them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from algorist.models.products import why_no_triton

# TRL sends a request on every trainer construction unless this is set before it is imported.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from trl.kernels import ChunkedLogProbFunction as ChunkedLogProbFunction
from trl.kernels import chunked_logprob as _chunked_logprob
from trl.trainer.utils import FusedCausalLMOutput as FusedCausalLMOutput

RECOMPUTE = "_gradient_checkpointing_func"
PRIVATE_NAMES = {
    "_save_checkpoint": "transformers.Trainer, overridden: a checkpoint is written beside its place, then moved there",
    "_load_from_checkpoint": "transformers.Trainer, called: the weights of a checkpoint of the last step",
    "_metrics": "trl.SFTTrainer, read: what is logged at the next line, to count nothing twice",
    "_TRITON_AVAILABLE": "trl.kernels.chunked_logprob, set: no Triton kernels where there is no C compiler",
    RECOMPUTE: "transformers' layers, wrapped: a recomputed layer knows the packed row (shared_prefix.py)",
    "_total_train_tokens": "trl.SFTTrainer, read and set: tokens so far, kept in checkpoints",
}


class SavesCheckpoints:
    """The override of ``_save_checkpoint``: hands the library's own writing to ``save_whole``."""

    def save_whole(self, write: Callable[[], None]) -> None:
        """Write a checkpoint by ``write`` so that it is whole or not there."""
        raise NotImplementedError

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        write = super()._save_checkpoint  # type: ignore[misc]
        self.save_whole(lambda: write(model, trial))


def keep_head_running(device: torch.device) -> None:
    """Let TRL's head compute its tiles in torch on a GPU where Triton does not run."""
    if device.type == "cuda" and why_no_triton() is not None:
        _chunked_logprob._TRITON_AVAILABLE = False


def load_weights(trainer: Any, checkpoint: Path) -> None:
    trainer._load_from_checkpoint(str(checkpoint))


def tokens_seen(trainer: Any) -> int:
    return int(trainer._total_train_tokens)


def set_tokens_seen(trainer: Any, tokens: int) -> None:
    trainer._total_train_tokens = tokens


def note(trainer: Any, values: dict[str, float]) -> None:
    """Add values to the next logged line of an SFT trainer."""
    for name, value in values.items():
        trainer._metrics["train"][name].append(value)


def mark(trainer: Any) -> tuple[dict[str, int], int]:
    """Return where the counters of an SFT trainer stand."""
    return {name: len(values) for name, values in trainer._metrics["train"].items()}, tokens_seen(trainer)


def rewind(trainer: Any, marked: tuple[dict[str, int], int]) -> None:
    """Put the counters of an SFT trainer back to where they stood."""
    lengths, tokens = marked
    for name, values in trainer._metrics["train"].items():
        del values[lengths.get(name, 0) :]
    set_tokens_seen(trainer, tokens)
