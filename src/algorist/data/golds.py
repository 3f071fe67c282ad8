"""What a grader makes of the gold answers of a dataset: which it cannot read, compares as text, or may read wrongly."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from algorist.data.local import may_be_decimal
from algorist.grading import grade, is_text_only, numeric_value, why_unreadable
from algorist.types import Problem


@dataclass
class GoldCheck:
    """The problems of a dataset by what the grader makes of their gold answers."""

    unreadable: list[tuple[Problem, str]] = field(default_factory=list)
    """Never paid, each with the reason."""
    text_only: list[Problem] = field(default_factory=list)
    """Right in the same words only."""
    decimal_commas: list[Problem] = field(default_factory=list)
    """Read as two numbers, and maybe meant as one."""
    reasons: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    """Questions that occur more than once, without their first time."""


def check_golds(problems: Sequence[Problem]) -> GoldCheck:
    """Grade every gold answer against itself."""
    check = GoldCheck(repeated=sum(n - 1 for n in Counter(p.question for p in problems).values()))
    for problem in problems:
        verdict = grade(problem.answer, problem.answer, problem=problem.columns())
        check.reasons[verdict.reason] += 1
        why = "" if problem.checker else why_unreadable(problem.answer)
        if not verdict.correct:
            reason = f"checker {problem.checker}: {verdict.reason}" if problem.checker else why
            check.unreadable.append((problem, reason or verdict.reason))
        if problem.checker:
            continue
        is_prose = verdict.reason == "equal_string" and _is_prose(problem.answer)
        if not why and (is_text_only(problem.answer) or is_prose):
            check.text_only.append(problem)
        if may_be_decimal(problem.answer):
            check.decimal_commas.append(problem)
    return check


def _is_prose(gold: str) -> bool:
    """Return whether a gold answer is several words, which only the same words equal."""
    words = re.findall(r"[^\W\d_]{2,}", re.sub(r"\\[a-zA-Z]+", " ", gold))
    return len(words) >= 2 and numeric_value(gold) is None
