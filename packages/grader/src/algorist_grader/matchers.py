"""The graders by name: what ``matcher:`` in a recipe may be."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from algorist_grader.algebra import is_close
from algorist_grader.hendrycks import hendrycks_sympy
from algorist_grader.numeric import numeric_value
from algorist_grader.registry import Registry
from algorist_grader.symbolic import Limits, Verdict, number_verdict, symbolic, verdict_of
from algorist_grader.text import MAX_ANSWER, clean, tight
from algorist_grader.workers import pool_for

log = logging.getLogger("algorist_grader.matchers")


Judge = Callable[[str, str, Limits], Verdict]


@dataclass(frozen=True, slots=True)
class Matcher:
    """A way to compare an extracted answer with a gold answer."""

    name: str
    claim: str
    judge: Judge


MATCHERS: Registry[Matcher] = Registry("matcher")


def _matcher(name: str, claim: str) -> Callable[[Judge], Judge]:
    def decorate(judge: Judge) -> Judge:
        MATCHERS.register(name)(Matcher(name, claim, judge))
        return judge

    return decorate


@_matcher("exact", "the same characters, white space around them aside")
def _exact(answer: str, gold: str, limits: Limits) -> Verdict:
    return _same_text(answer.strip(), gold.strip())


@_matcher("exact_no_space", "the same characters, all white space aside")
def _exact_no_space(answer: str, gold: str, limits: Limits) -> Verdict:
    return _same_text("".join(answer.split()), "".join(gold.split()))


def _same_text(answer: str, gold: str) -> Verdict:
    return answer == gold, "equal_string" if answer == gold else "different"


def _too_long(answer: str, gold: str) -> Verdict | None:
    """Return the verdict where a text is longer than any answer; nothing else may look at it."""
    if len(gold) > MAX_ANSWER:
        return False, "unparseable_gold"
    return (False, "unparseable_answer") if len(answer) > MAX_ANSWER else None


@_matcher("numeric", "the same exact number; answers that are not numbers must be the same text")
def _numeric(answer: str, gold: str, limits: Limits) -> Verdict:
    if too_long := _too_long(answer, gold):
        return too_long
    right = numeric_value(gold)
    if right is None:
        truth = clean(gold)
        if not truth:
            return False, "unparseable_gold"
        return _same_text(tight(clean(answer) or "").casefold(), tight(truth).casefold())
    left = numeric_value(answer)
    if left is None:
        return False, "unparseable_answer"
    return number_verdict(answer, gold, is_close(left, right, limits.tolerance))


@_matcher("ratio_bands", "a number within 10 % of the gold one: near is right; not for honest figures")
def _ratio_bands(answer: str, gold: str, limits: Limits) -> Verdict:
    if answer.strip() == gold.strip():
        return True, "equal_string"
    left, right = numeric_value(answer), numeric_value(gold)
    if right is None:
        return False, "unparseable_gold"
    if left is None:
        return False, "unparseable_answer"
    same = left == right or (right != 0 and Fraction(9, 10) <= left / right <= Fraction(11, 10))
    return same, "equal_number" if same else "different"


@_matcher(
    "symbolic",
    "equal mathematics: strings, exact numbers, expressions, sets, intervals, matrices, units (the default)",
)
def _symbolic(answer: str, gold: str, limits: Limits) -> Verdict:
    return symbolic(answer, gold, limits)


@_matcher(
    "symbolic_fast", "as symbolic, without the worker processes: what is not quickly shown is not right"
)
def _symbolic_fast(answer: str, gold: str, limits: Limits) -> Verdict:
    return symbolic(answer, gold, limits, slow=False)


@_matcher("hendrycks_sympy", "MATH's normaliser, then PRM800K's rules: unreduced fractions are wrong")
def _hendrycks(answer: str, gold: str, limits: Limits) -> Verdict:
    if too_long := _too_long(answer, gold):
        return too_long
    same = hendrycks_sympy(answer, gold)
    return same, "equal_symbolic" if same else "different"


@_matcher(
    "latex_verify",
    "math-verify's verdict, in a worker process with a hard limit; as symbolic where math-verify is not installed",
)
def _latex_verify(answer: str, gold: str, limits: Limits) -> Verdict:
    if too_long := _too_long(answer, gold):
        return too_long
    if _missing:
        return symbolic(answer, gold, limits)
    reply = pool_for("latex_verify", max(limits.timeout_s, 1.0), max(limits.memory_mb, 512)).ask(answer, gold)
    if reply.error == "missing":
        _fall_back(reply.detail)
        return symbolic(answer, gold, limits)
    return verdict_of(reply, right="equal_symbolic", unsure="unparseable_gold")


_missing = ""
_missing_lock = threading.Lock()


def deciding_matcher(name: str) -> str:
    """Return the matcher that decides for ``name`` here: ``symbolic`` where ``latex_verify`` lacks its package."""
    if name == "latex_verify" and not _missing:
        _latex_verify("1", "1", Limits())
    return "symbolic" if name == "latex_verify" and _missing else name


def _fall_back(what: str) -> None:
    """Remember that math-verify is missing and say so once in this process."""
    global _missing
    with _missing_lock:
        said, _missing = bool(_missing), what
    if said:
        return
    log.warning("%s. Until then the matcher 'latex_verify' decides as 'symbolic' does, algorist's own", what)
