"""The front of the grader: one answer, one completion, or many of them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from algorist_grader.checkers import check
from algorist_grader.extract import extract, last_number
from algorist_grader.matchers import MATCHERS, Judge
from algorist_grader.numeric import numeric_value
from algorist_grader.symbolic import Limits, Verdict
from algorist_grader.types import MISSING_TAG, UNFINISHED, Grade, Parsed

log = logging.getLogger(__name__)
_REASONS = "unparseable_gold unparseable_answer different ambiguous crashed memory timeout".split()
_RANK = {reason: rank for rank, reason in enumerate(_REASONS)}
_CACHE_BYTES = 16 * 2**20
LONGEST_BITS = 14_000
"""Whole numbers of more are no gold answers: Python writes 4,300 digits at most."""
_ENTRY = 400
"""Bytes of one entry beside its texts: key tuple, value, place in the dictionary."""


class VerdictCache:
    """What was asked lately, at most ``limit`` bytes of it: two generations, the older is dropped when the younger is full.

    Every operation is one step of a dictionary: threads may share it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._young: dict[Hashable, Verdict] = {}
        self._old: dict[Hashable, Verdict] = {}
        self._bytes = 0

    def get(self, key: Hashable) -> Verdict | None:
        """Return what was kept, or None."""
        return self._young.get(key) or self._old.get(key)

    def put(self, key: Hashable, verdict: Verdict, *texts: str) -> None:
        """Keep a verdict whose key holds these texts; an entry of more than a hundredth of the limit is not kept."""
        size = _ENTRY + sum(map(sys.getsizeof, texts))
        if size * 100 > self.limit:
            return
        if self._bytes + size > self.limit // 2:
            self._old, self._young, self._bytes = self._young, {}, 0
        self._young[key] = verdict
        self._bytes += size

    def clear(self) -> None:
        """Forget everything."""
        self._young, self._old, self._bytes = {}, {}, 0

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())


_verdicts = VerdictCache(_CACHE_BYTES)


def grade(
    answer: str | None,
    gold: Any,
    *,
    matcher: str = "symbolic",
    timeout_s: float = 1.0,
    memory_mb: int = 512,
    tolerance: float | None = None,
    problem: Mapping[str, Any] | None = None,
) -> Grade:
    """Grade an extracted answer against a gold answer, or against several of which any one will do.

    Verdicts are remembered (up to 16 MiB of them), so each answer is decided once per gold and matcher; one that a limit cut
    short is asked for again. A bad answer is never an exception.

    Args:
        answer: What was extracted; None or blank is ``no_answer``.
        gold: The gold answer as text, a number or a tensor with one number; or a sequence of these.
        matcher: A name in ``MATCHERS``.
        timeout_s: Wall clock of a slow decision in its worker process (s).
        memory_mb: Memory of that process beyond what the interpreter itself takes (MiB).
        tolerance: Relative tolerance for numbers, only where a dataset declares one.
        problem: The problem's columns; where they name a ``checker``, that decides, and the gold answer does not.

    Raises:
        ConfigError: Unknown matcher or checker.
        GradingError: Worker processes do not start.
    """
    judge = MATCHERS.get(matcher).judge
    began = time.perf_counter()
    golds = [gold] if isinstance(gold, str) else gold_texts(gold)
    shown = golds[0] if golds else ""
    answer = None if answer is None else str(answer)
    if answer is None or not answer.strip():
        return Grade(False, "no_answer", answer, shown, time.perf_counter() - began)
    if problem and problem.get("checker"):
        correct, reason = check(problem["checker"], problem, answer, Limits(timeout_s, memory_mb))
        return Grade(correct, reason, answer, shown, time.perf_counter() - began)
    best: Verdict = (False, "unparseable_gold")
    for one in golds:
        if not one.strip():
            continue
        key = (answer, one, judge, timeout_s, memory_mb, tolerance)
        verdict = _verdicts.get(key)
        if verdict is None:
            verdict = _judged(judge, answer, one, Limits(timeout_s, memory_mb, tolerance))
            if verdict[1] not in UNFINISHED:
                _verdicts.put(key, verdict, answer, one)
        if verdict[0]:
            return Grade(True, verdict[1], answer, one, time.perf_counter() - began)
        if _RANK.get(verdict[1], 2) > _RANK.get(best[1], 2):
            best = verdict
    return Grade(False, best[1], answer, shown, time.perf_counter() - began)


def _judged(judge: Judge, answer: str, gold: str, limits: Limits) -> Verdict:
    """Ask a matcher; what it did not foresee in an answer is a verdict too."""
    try:
        right, reason = judge(answer, gold, limits)
        return bool(right), reason
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        log.debug("%s while grading %.80r against %.80r", type(error).__name__, answer, gold)
        return False, "crashed"


def gold_texts(gold: Any) -> list[str]:
    """Return gold answers as texts: a text, a number, a tensor or array of numbers, or a sequence of these."""
    if isinstance(gold, str):
        return [gold]
    if hasattr(gold, "tolist"):
        gold = gold.tolist()
    if isinstance(gold, (list, tuple)):
        return [text for one in gold for text in gold_texts(one)]
    if gold is None or (isinstance(gold, int) and gold.bit_length() > LONGEST_BITS):
        return []
    return [str(int(gold) if isinstance(gold, float) and gold.is_integer() else gold)]


def forget_verdicts() -> None:
    """Empty the cache of verdicts (for measurements)."""
    _verdicts.clear()


def grade_completion(
    text: str,
    gold: Any,
    *,
    parsed: Parsed | None = None,
    matcher: str = "symbolic",
    tolerance: float | None = None,
    problem: Mapping[str, Any] | None = None,
) -> Grade:
    """Grade a completion: its answer as its prompt format read it (``parsed``), or extracted in the generic order.

    An answer that cannot be read because one tag is missing has that tag as its reason (``MISSING_TAG``).
    """
    if parsed is None:
        extracted = extract(text)
        answer, ambiguous = extracted.answer, extracted.ambiguous
    else:
        answer, ambiguous = parsed.answer, "several_answers" in parsed.flags
    if ambiguous:
        return Grade(False, "ambiguous", answer, next(iter(gold_texts(gold)), ""))
    verdict = grade(answer, gold, matcher=matcher, tolerance=tolerance, problem=problem)
    flags = parsed.flags if parsed is not None and verdict.reason == "no_answer" else ()
    missing = next((reason for flag, reason in MISSING_TAG.items() if flag in flags), None)
    return replace(verdict, reason=missing) if missing else verdict


def is_right_leniently(text: str, gold: Any, problem: Mapping[str, Any] | None = None) -> bool:
    """Tell whether the last number of a completion is the gold answer, whatever the completion's form; never for other golds.

    Where the problem names a checker, that decides on the last number.
    """
    if problem and problem.get("checker"):
        return grade(last_number(text), gold, problem=problem).correct
    numbers = [one for one in gold_texts(gold) if numeric_value(one) is not None]
    return bool(numbers) and grade(last_number(text), numbers, matcher="numeric").correct


def grade_many(
    pairs: Sequence[tuple[str | None, str | Sequence[str]]],
    *,
    matcher: str = "symbolic",
    workers: int = 4,
    timeout_s: float = 1.0,
    tolerance: float | None = None,
) -> list[Grade]:
    """Grade many (answer, gold) pairs: the same verdicts in the same order whatever ``workers`` is; equal pairs once."""
    keys = [(a, g if isinstance(g, str) else tuple(g)) for a, g in pairs]
    distinct = list(dict.fromkeys(keys))

    def one(key: tuple[str | None, str | tuple[str, ...]]) -> Grade:
        return grade(key[0], key[1], matcher=matcher, timeout_s=timeout_s, tolerance=tolerance)

    if workers <= 1 or len(distinct) < 2:
        verdicts = {key: one(key) for key in distinct}
    else:
        with ThreadPoolExecutor(workers, thread_name_prefix="grade") as threads:
            verdicts = dict(zip(distinct, threads.map(one, distinct), strict=True))
    return [verdicts[key] for key in keys]
