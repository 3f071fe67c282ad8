"""The checker ``reasoning_gym``: the package's own ``score_answer``.

Some of its scorers evaluate the answer as Python, so they run in a worker process with limits that may neither write files nor start
processes nor open connections.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from algorist_grader.checkers import checker
from algorist_grader.errors import MissingExtraError

_FORBIDDEN = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "signal.")
_HARMLESS = ("os.listdir", "os.scandir", "os.walk")
_guarded = False


def package() -> Any:
    """Return the module ``reasoning_gym``.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise MissingExtraError(
            f"'reasoning_gym' needs the package reasoning-gym ({error}); pip install 'algorist[reasoning-gym]'"
        ) from None
    return reasoning_gym


@checker("reasoning_gym", isolated=True)
def reasoning_gym(problem: Mapping[str, Any], answer: str) -> bool:
    """Whether reasoning-gym gives the answer its full score; partial scores are not right."""
    scorer = _scorer(problem["generator"])
    _guard()
    return bool(scorer(answer, ast.literal_eval(problem["entry"])) >= 1.0)


@cache
def _scorer(generator: str) -> Any:
    return package().get_score_answer_fn(generator)


def _guard() -> None:
    """From now on this process may read and compute, nothing else; a hook cannot be taken back."""
    global _guarded
    if not _guarded:
        _guarded = True
        sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if writes or (event.startswith(_FORBIDDEN) and event not in _HARMLESS):
        raise PermissionError(f"an answer tried {event}")
