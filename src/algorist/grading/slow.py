"""The last rung, run in a worker: the same comparison as in the calling process, decided with as many digits as needed."""

from __future__ import annotations

from algorist.grading.algebra import Unreadable, equal, read
from algorist.grading.text import clean


def judge(answer: str, gold: str) -> bool | None:
    """Return whether two cleaned texts are the same answer, or None where no value exists to compare."""
    try:
        return equal(read(clean(answer) or ""), read(clean(gold) or ""), length=len(answer) + len(gold))
    except Unreadable:
        return None
