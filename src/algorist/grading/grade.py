"""The front of the grader: one answer, one completion, or many of them."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from algorist.grading.extract import extract
from algorist.grading.ladder import Limits, Verdict, why_unreadable
from algorist.grading.matchers import MATCHERS
from algorist.types import Grade, Parsed

_RANK = {
    "timeout": 6,
    "memory": 5,
    "crashed": 4,
    "ambiguous": 3,
    "different": 2,
    "unparseable_answer": 1,
    "unparseable_gold": 0,
}


def grade(
    answer: str | None,
    gold: str | Sequence[str],
    *,
    matcher: str = "symbolic",
    timeout_s: float = 1.0,
    memory_mb: int = 512,
    tolerance: float | None = None,
) -> Grade:
    """Grade an extracted answer against a gold answer, or against several of which any one will do.

    Args:
        answer: What was extracted; None or blank is ``no_answer``.
        gold: The gold answer as text.
        matcher: A name in ``MATCHERS``.
        timeout_s: Wall clock of a slow decision in its worker process (s).
        memory_mb: Memory of that process beyond what the interpreter itself takes (MiB).
        tolerance: Relative tolerance for numbers, only where a dataset declares one.

    Raises:
        ConfigError: Unknown matcher.
        GradingError: Worker processes do not start.
    """
    judge = MATCHERS.get(matcher).judge
    began = time.perf_counter()
    golds = [gold] if isinstance(gold, str) else [str(g) for g in gold]
    shown = golds[0] if golds else ""
    if answer is None or not answer.strip():
        return Grade(False, "no_answer", answer, shown, time.perf_counter() - began)
    limits = Limits(timeout_s, memory_mb, tolerance)
    best: Verdict = (False, "unparseable_gold")
    for one in golds:
        if not one.strip():
            continue
        found = judge(answer, one, limits)
        if found[0]:
            return Grade(True, found[1], answer, one, time.perf_counter() - began)
        if _RANK.get(found[1], 2) > _RANK.get(best[1], 2):
            best = found
    return Grade(False, best[1], answer, shown, time.perf_counter() - began)


def grade_completion(
    text: str,
    gold: str | Sequence[str],
    *,
    parsed: Parsed | None = None,
    matcher: str = "symbolic",
    tolerance: float | None = None,
) -> Grade:
    """Grade a completion: its answer as its prompt format read it (``parsed``), or extracted in the generic order."""
    shown = gold if isinstance(gold, str) else next(iter(gold), "")
    if parsed is None:
        found = extract(text)
        if found.ambiguous:
            return Grade(False, "ambiguous", found.answer, shown)
        return grade(found.answer, gold, matcher=matcher, tolerance=tolerance)
    if "several_answers" in parsed.flags:
        return Grade(False, "ambiguous", parsed.answer, shown)
    return grade(parsed.answer, gold, matcher=matcher, tolerance=tolerance)


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
        found = {key: one(key) for key in distinct}
    else:
        with ThreadPoolExecutor(workers, thread_name_prefix="grade") as threads:
            found = dict(zip(distinct, threads.map(one, distinct), strict=True))
    return [found[key] for key in keys]


def hash_answer(text: str) -> str | None:
    """Return what stands behind the last ``####`` of a GSM8K solution, or None."""
    found = re.findall(r"####\s*(.+)", text)
    return found[-1].strip() if found else None


__all__ = ["grade", "grade_completion", "grade_many", "hash_answer", "why_unreadable"]
