"""Every error that algorist raises on purpose: the grader's, and those of training, data and runs, built on the same base."""

from __future__ import annotations

from algorist_grader.errors import (
    AlgoristError,
    ConfigError,
    GradingError,
    MissingExtraError,
    check_known,
    nearest,
)

__all__ = [
    "DAMAGED", "AlgoristError", "CheckpointError", "ConfigError", "DataError", "EngineError", "GradingError", "HubError",
    "MissingExtraError", "RewardError", "TrainingError", "check_known", "is_disk_full", "is_out_of_memory", "nearest",
]  # fmt: skip

DAMAGED = (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError)
"""Errors of reading a JSON file of unknown origin: not there, not JSON, nested too deeply, of another shape."""


class DataError(AlgoristError, ValueError):
    """A dataset, a column or a row is missing or unreadable."""


class EngineError(AlgoristError, RuntimeError):
    """A rollout engine cannot do what was asked."""


class CheckpointError(AlgoristError, RuntimeError):
    """A checkpoint or a run folder is missing, damaged or belongs to another run."""


class RewardError(AlgoristError, RuntimeError):
    """A user's reward function hangs."""

    exit_code = 1


class TrainingError(AlgoristError, RuntimeError):
    """Training cannot go on: gradients are not finite, or memory does not hold the smallest batch."""

    exit_code = 1


class HubError(AlgoristError, RuntimeError):
    """The hub cannot be reached or refuses; ``retry`` tells whether the same call may work later."""

    exit_code = 1

    def __init__(self, message: str, *, retry: bool = True) -> None:
        super().__init__(message)
        self.retry = retry


def is_disk_full(error: BaseException) -> bool:
    """Return whether an exception of torch, safetensors or a C++ library says that a file cannot be written any longer."""
    said = ("PytorchStreamWriter", "inline_container", "iostream error", "No space left", "File too large")
    return any(part in str(error) for part in said)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception of Python, torch or oneDNN says that memory ran out."""
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    from accelerate.utils.memory import should_reduce_batch_size

    named = type(error).__name__ == "OutOfMemoryError"  # torch's, whatever it says
    of_onednn = str(error).startswith("could not create a ")
    return named or should_reduce_batch_size(error) or of_onednn
