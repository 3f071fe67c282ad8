"""The last rung, run in a worker: the same comparison as in the calling process, decided with as many digits as needed."""

from __future__ import annotations

from algorist.grading.compare import canonical, equal
from algorist.grading.grammar import parse
from algorist.grading.precise import decide
from algorist.grading.probe import quick
from algorist.grading.text import clean
from algorist.grading.tree import Node, Unreadable


def judge(answer: str, gold: str) -> bool | None:
    """Return whether two cleaned texts are the same answer, or None where no value exists to compare."""

    def scalar(a: Node, b: Node) -> bool | None:
        told = quick(a, b)
        return told if told is not None else decide(a, b, len(answer) + len(gold))

    try:
        return equal(canonical(parse(clean(answer) or "")), canonical(parse(clean(gold) or "")), scalar)
    except Unreadable:
        return None
