"""Worker process of the grader (see ``child_process``): one pair of texts in, one verdict out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from algorist_grader.algebra import Unreadable, equal, read
from algorist_grader.checkers import load_checker
from algorist_grader.errors import MissingExtraError
from algorist_grader.text import clean

_WARM = (("\\frac{1}{2}", "0.5"), ("\\sqrt{5+2\\sqrt{6}}", "\\sqrt{2}+\\sqrt{3}"), ("x^2-1", "(x-1)(x+1)"))
"""Pairs that load what a first real one would load, before the worker says that it is ready."""


def prepare(matcher: str) -> tuple[Callable[[bytes], bool | None], dict[str, str]]:
    """Return the judge of a matcher, warmed up; ``{"missing": …}`` beside it where a package cannot be imported."""
    sys.setrecursionlimit(3_000)
    if ":" in matcher:
        check = load_checker(matcher)
        return (lambda request: check(*reversed(json.loads(request)))), {}
    judge = symbolic
    if matcher == "latex_verify":
        try:
            from algorist_grader.math_verify import latex_verify as judge
        except MissingExtraError as error:
            return (lambda _: None), {"missing": str(error)}
    for answer, gold in _WARM:
        judge(answer, gold)
    return (lambda request: judge(*json.loads(request))), {}


def symbolic(answer: str, gold: str) -> bool | None:
    """Return whether two cleaned texts are the same answer, with as many digits as needed; None where no value exists to compare."""
    try:
        return equal(read(clean(answer) or ""), read(clean(gold) or ""), length=len(answer) + len(gold))
    except Unreadable:
        return None
