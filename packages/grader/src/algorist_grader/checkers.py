"""Checkers: what decides where a problem has many right answers, ``check(problem, answer) -> bool`` beside the gold answer.

A problem names its checker. A registered one is a pure function of the problem's columns and the extracted answer; one that may
hang, or a user's own (``file.py:function``), runs in a killable worker process. A checker that raises pays nothing and is
reported once, in words; so is one that returns anything but True or False.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from algorist_grader.child_process import Answer
from algorist_grader.errors import GradingError
from algorist_grader.registry import Registry
from algorist_grader.symbolic import Limits, Verdict, verdict_of
from algorist_grader.text import MAX_ANSWER
from algorist_grader.user_code import find_file, functions_of, import_file, no_function
from algorist_grader.workers import pool_for

log = logging.getLogger("algorist_grader.checkers")
Check = Callable[[Mapping[str, Any], str], bool]
_LIMITS = Limits()
WORKER_S = 5.0
"""Least limit of an answer in a worker process (s): the first one may import what it needs."""


CHECKERS: Registry[Check | str] = Registry(
    "checker", ["algorist_grader.countdown", "algorist_grader.reasoning_gym"]
)
"""A function of this process, or the ``module:function`` or ``file.py:function`` that a worker process calls."""
_reported: set[str] = set()


def checker(name: str, *, isolated: bool = False) -> Callable[[Check], Check]:
    """Register ``function(problem, answer) -> bool``; the function itself stays as it is.

    Args:
        name: The name in rows and recipes.
        isolated: Run it in a worker process with limits of time and memory; it must be a module's function.
    """

    def decorate(function: Check) -> Check:
        CHECKERS.register(name)(f"{function.__module__}:{function.__name__}" if isolated else function)
        return function

    return decorate


def find_checker(name: str) -> Check | str:
    """Return a checker by its name or as ``file.py:function``.

    Raises:
        ConfigError: Unknown name, or no such file.
    """
    return CHECKERS.get(name) if ".py:" not in name else _in_file(name)[0]


@lru_cache(maxsize=64)
def _in_file(name: str) -> tuple[str, int]:
    """Return a checker's file and function, and the time of the file's last change (ns), as they were first seen."""
    path, function = find_file(name, f"checker '{name}'", f", or one of {', '.join(CHECKERS.names())}")
    return f"{path}:{function}", path.stat().st_mtime_ns


def read_files_again() -> None:
    """Take the checkers' files as they are now: what was edited decides from here on, not in the middle of a run."""
    _in_file.cache_clear()


def check(name: str, problem: Mapping[str, Any], answer: str, limits: Limits) -> Verdict:
    """Return a checker's verdict: ``checked`` where it is right, else ``different``, or the error that ended it.

    Raises:
        ConfigError: Unknown checker.
        GradingError: The checker's file cannot be imported or has no such function.
    """
    if len(answer) > MAX_ANSWER:
        return False, "unparseable_answer"
    reply = ask(name, problem, answer, limits)
    if reply.error and name not in _reported:
        _reported.add(name)
        where = f"the answer {answer[:80]!r} of problem {problem.get('problem_id', '?')}"
        why = reply.detail.partition("\n")[0] or reply.error
        log.warning(
            "checker '%s' failed on %s: %s; such answers count as wrong (shown once)", name, where, why
        )
    return verdict_of(reply, right="checked", unsure="different")


def ask(name: str, problem: Mapping[str, Any], answer: str, limits: Limits = _LIMITS) -> Answer:
    """Return a checker's verdict, or its error with the reason in words; raises as ``check`` does."""
    function = find_checker(name)
    if isinstance(function, str):
        version = _in_file(name)[1] if ".py:" in name else 0
        pool = pool_for(function, max(limits.timeout_s, WORKER_S), max(limits.memory_mb, 512), version)
        return pool.ask(answer, json.dumps(dict(problem), default=str))
    try:
        return Answer(_verdict(function(problem, answer)))
    except Exception as error:
        return Answer(None, "raised", f"{type(error).__name__}: {error}")


def load_checker(target: str) -> Callable[[str, str], bool]:
    """Return the function of a ``target`` as a worker calls it: with the problem's columns as JSON, and the answer.

    Raises:
        GradingError: No such function.
    """
    place, _, name = target.rpartition(":")
    module = import_file(Path(place)) if place.endswith(".py") else import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise GradingError(f"{place} {no_function(name, functions_of(module))}")
    return lambda columns, answer: _verdict(function(json.loads(columns), answer))


def _verdict(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"it returned {value!r}; expected True or False")
    return value
