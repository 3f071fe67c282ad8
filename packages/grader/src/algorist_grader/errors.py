"""The errors that the grader raises on purpose; a bad answer is data and never one of them.

A message says what was wrong and where, what was expected, the nearest valid value, and the next command or line to
write. Each class is also the built-in exception a caller would expect, and is picklable.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class AlgoristError(Exception):
    """Base of all errors raised by algorist."""

    exit_code: ClassVar[int] = 2
    """Of the command line: 2 for what the user can mend, 1 for what failed on the way."""


class ConfigError(AlgoristError, ValueError):
    """A recipe, an override or an argument is not valid."""


class GradingError(AlgoristError, RuntimeError):
    """The grader itself failed (a bad completion is data, never this)."""

    exit_code = 1


class MissingExtraError(AlgoristError, ImportError):
    """An optional dependency is not installed."""


def named(error: BaseException) -> str:
    """Return the class of an error and its message, which it may fail to tell; at most 16,000 characters."""
    try:
        return f"{type(error).__name__}: {str(error)[:16_000]}"
    except BaseException:
        return f"{type(error).__name__}: "


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
