"""One place where rewards ask the grader; the same answer to the same problem is graded once.

The completions of a group often end in the same answer, and several rewards ask about it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from algorist.grading import grade
from algorist.types import Grade

_KEPT = 16_384
_seen: OrderedDict[tuple[str | None, str, str], Grade] = OrderedDict()
_lock = threading.Lock()


def verdict(answer: str | None, gold: str, matcher: str) -> Grade:
    """Return the grader's verdict on an extracted answer; one that a limit cut short is asked for again."""
    key = (answer, gold, matcher)
    with _lock:
        if key in _seen:
            _seen.move_to_end(key)
            return _seen[key]
    found = grade(answer, gold, matcher=matcher)
    if found.reason not in ("timeout", "memory", "crashed"):
        with _lock:
            _seen[key] = found
            while len(_seen) > _KEPT:
                _seen.popitem(last=False)
    return found
