"""What a worker process of the grader does (see ``child_process``): one pair of texts in, one verdict out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

Judge = Callable[[str, str], "bool | None"]
_WARM = (("\\frac{1}{2}", "0.5"), ("\\sqrt{5+2\\sqrt{6}}", "\\sqrt{2}+\\sqrt{3}"), ("x^2-1", "(x-1)(x+1)"))
"""Pairs that load what a first real one would load, before the worker says that it is ready."""


def prepare(matcher: str) -> tuple[Callable[[bytes], bool | None], dict[str, str]]:
    """Return the judge of a matcher, warmed up; ``{"missing": …}`` beside it where a package cannot be imported."""
    from algorist.errors import MissingExtraError

    sys.setrecursionlimit(3_000)
    judge: Judge
    if ":" in matcher:
        from algorist.grading.checkers import load_checker

        found = load_checker(matcher)
        return (lambda request: found(*reversed(json.loads(request)))), {}
    try:
        if matcher == "latex_verify":
            from algorist.grading.math_verify import latex_verify as judge
        else:
            from algorist.grading.slow import judge
    except MissingExtraError as error:
        return (lambda _: None), {"missing": str(error)}
    for answer, gold in _WARM:
        judge(answer, gold)

    def answer_one(request: bytes) -> bool | None:
        pair = json.loads(request)
        return judge(pair[0], pair[1])

    return answer_one, {}
