"""Every error that algorist raises on purpose.

A message says what was wrong and where, what was expected, the nearest valid value, and the next command or line to
write. Each class is also the built-in exception a caller would expect, and is picklable.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

DAMAGED = (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError)
"""What reading a JSON file of unknown origin can raise: not there, not JSON, nested too deeply, of another shape."""


class AlgoristError(Exception):
    """Base of all errors raised by algorist."""

    exit_code: ClassVar[int] = 2
    """Of the command line: 2 for what the user can mend, 1 for what failed on the way."""


class ConfigError(AlgoristError, ValueError):
    """A recipe, an override or an argument is not valid."""


class DataError(AlgoristError, ValueError):
    """A dataset, a column or a row is missing or unreadable."""


class GradingError(AlgoristError, RuntimeError):
    """The grader itself failed (a bad completion is data, never this)."""

    exit_code = 1


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


class MissingExtraError(AlgoristError, ImportError):
    """An optional dependency is not installed."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest valid name, or an empty string."""
    near = difflib.get_close_matches(str(name), [str(v) for v in valid], n=1, cutoff=0.5)
    return f" Did you mean '{near[0]}'?" if near else ""


def check_known(
    name: str,
    valid: Iterable[str],
    said: str,
    then: str = "Expected: {}",
    kind: type[AlgoristError] = ConfigError,
) -> None:
    """Refuse a name that is not valid: what was said, the nearest name, and ``then`` with all of them in its braces."""
    names = list(valid)
    if name not in names:
        raise kind(f"{said}.{nearest(name, names)} {then.format(', '.join(map(str, names)) or 'none')}")


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
