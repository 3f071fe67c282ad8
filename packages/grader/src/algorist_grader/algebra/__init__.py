"""The algebra of answers, with one door: ``read`` a text, then ask whether two readings are ``equal``.

Tokens, a grammar, trees in one canonical order, and two ways to decide on expressions: exact and floating point values at
once, values with as many digits as needed in a worker process.
"""

from __future__ import annotations

from fractions import Fraction

from algorist_grader.algebra import compare
from algorist_grader.algebra.canonical import canonical
from algorist_grader.algebra.decide_fast import quick
from algorist_grader.algebra.parser import parse
from algorist_grader.algebra.spelling import respelled, several_readings
from algorist_grader.algebra.tree import Node, Unreadable, num
from algorist_grader.algebra.units import number_in_words

__all__ = ["Node", "Unreadable", "equal", "is_close", "read"]


def read(text: str) -> Node:
    """Return the canonical tree of cleaned text.

    Raises:
        Unreadable: The text is not an answer that the grammar knows.
    """
    value = number_in_words(text) if text[:1].isalpha() or (" and " in text and text[-1:].isalpha()) else None
    if value is not None:
        return num(value)
    try:
        readings = several_readings(text) or (text,)
        trees = tuple(canonical(parse(respelled(one))) for one in readings)
        return trees[0] if len(trees) == 1 else ("either", trees)
    except RecursionError:
        raise Unreadable("nested too deep", "too_large") from None
    except (ArithmeticError, ValueError):
        raise Unreadable("a number that is too large", "too_large") from None


def equal(answer: Node, gold: Node, *, tolerance: float | None = None, length: int = 0) -> bool | None:
    """Return whether a read answer is the read gold; None where only more digits can tell.

    Args:
        answer: What ``read`` made of the answer.
        gold: What ``read`` made of the gold.
        tolerance: Relative tolerance for two plain numbers; None compares exactly.
        length: Characters of both texts; above 0 the digits they can hide are computed (slow: in a worker process).

    Raises:
        Unreadable: The two cannot be compared.
    """

    def scalar(a: Node, b: Node) -> bool | None:
        if tolerance is not None and a[0] == b[0] == "num":
            return is_close(a[1], b[1], tolerance)
        same = quick(a, b)
        if same is None and length:
            from algorist_grader.algebra.decide_exact import decide  # mpmath, only in a worker

            same = decide(a, b, length)
        return same

    try:
        return compare.equal(compare.without_question(answer, gold), gold, scalar)
    except RecursionError:
        raise Unreadable("nested too deep", "too_large") from None
    except (ArithmeticError, ValueError):
        raise Unreadable("a number that is too large", "too_large") from None


def is_close(a: Fraction, b: Fraction, tolerance: float | None) -> bool:
    """Return whether two numbers are equal, or within a relative tolerance of the second where there is one."""
    return a == b or (tolerance is not None and abs(a - b) <= Fraction(tolerance) * abs(b))
