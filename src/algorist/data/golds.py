"""Gold answers: how they are read from what datasets publish, and what the grader makes of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from algorist.store.safe_text import printable
from algorist.types import Problem
from algorist_grader import grade, is_text_only, last_boxed, numeric_value, why_unreadable
from algorist_grader.markers import hash_answer
from algorist_grader.text import clean, stripped

_GROUPS = r"[1-9]\d{0,2}(?:\.\d{3})+"
_LOCAL = rf"(?:{_GROUPS}|\d+)(?:,|\{{,\}})\d+"
_NUMBER = re.compile(rf"(?<![\d.,}}])(?:{_LOCAL}|{_GROUPS})(?![\d.,]|\{{,\}})")
_ONE_NUMBER = re.compile(rf"[^\d.,()\[\]]*{_LOCAL}[^\d.,()\[\]]*")
_OTHERWISE = re.compile(
    r"[^\d,()\[\]]*\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d+)?[^\d,()\[\]]*|\([^\w()\[\],]*\d{1,3}(?:,\d{3})+(?:\.\d+)?\)"
)
_THOUSANDS = re.compile(r"(?<!\d)[1-9]\d{0,2}(?:(?:,|\{,\})\d{3})+(?!\d)")


def extract_hash_answer(text: str) -> str:
    """Return the rest of the line after the last ``####``, stripped; without a marker the whole text, stripped."""
    return (hash_answer(text) or "") if "####" in text else text.strip()


def clean_solution(text: str) -> str:
    """Return the worked steps without calculator annotations ``<<…>>`` and without the answer line."""
    steps, mark, answer = text.rpartition("####")
    return re.sub(r"<<[^<>]*>>", "", steps if mark else answer).strip()


def stated_gold(value: object, way: str) -> object:
    """Return the gold answer in a column that may hold a worked solution, read ``as_is``, by ``hash``, ``boxed`` or ``auto``."""
    if not isinstance(value, str) or way == "as_is":
        return value
    if way == "hash" or (way == "auto" and "####" in value):
        return extract_hash_answer(value) if "####" in value else ""
    if way == "boxed" or (way == "auto" and "\\boxed" in value):
        return last_boxed(value)
    return value


def plain_number(value: object) -> str:
    """Return a number without a needless ``.0``, leading zeros or plus sign; any other text stripped."""
    text = "" if value is None else stripped(str(value))
    match = re.fullmatch(r"\+?(-?)0*(\d+)(\.0+)?", text)
    return f"{match[1]}{match[2]}" if match else text


def without_dollars(value: object) -> str:
    """Return the text inside one pair of ``$`` around all of it; any other text stripped."""
    text = "" if value is None else stripped(str(value))
    match = re.fullmatch(r"\$([^$]*[^$\\])\$", text)
    return match[1].strip() if match else text


def may_be_decimal(gold: str) -> bool:
    """Return whether a gold answer may be one number with a decimal comma: ``12,5``, ``1.234,5``, ``12,5 %``."""
    return bool(_ONE_NUMBER.fullmatch(gold)) and not _THOUSANDS.search(gold)


def with_points(value: object) -> object:
    """Return a gold answer, or each of several, with decimal points in place of decimal commas and no points of thousands."""
    if isinstance(value, (list, tuple)):
        return [with_points(one) for one in value]
    if not isinstance(value, str):
        return value
    return _NUMBER.sub(lambda m: re.sub(r",|\{,\}", "!", m[0]).replace(".", "").replace("!", "."), value)


@dataclass
class GoldCheck:
    """The problems of a dataset by what the grader makes of their gold answers."""

    unreadable: list[tuple[Problem, str]] = field(default_factory=list)
    """Never paid, each with the reason."""
    text_only: list[Problem] = field(default_factory=list)
    """Right in the same words only."""
    decimal_commas: list[Problem] = field(default_factory=list)
    """Read as two numbers, and maybe meant as one."""
    grouped: list[Problem] = field(default_factory=list)
    """Read as several numbers, and maybe one as India or accounts write it."""
    reasons: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    """Questions that occur more than once, without their first time."""
    conflicting: list[tuple[Problem, Problem]] = field(default_factory=list)
    """The same question with another gold answer than its first time, after that one."""

    def warnings(self, kind: str, count: int) -> list[str]:
        """Warn, in a line each, of faults that no training can mend: gold answers that are never paid, questions with two of them.

        Args:
            kind: Which problems these are, such as ``training``.
            count: How many there are.
        """
        lines = []
        if self.unreadable:
            problem, why = self.unreadable[0]
            lines.append(
                f"warning: {len(self.unreadable)} of {count} {kind} problems have a gold answer that the "
                f"grader cannot read, such as {problem.id}: {printable(problem.answer[:60])} ({why})"
            )
        if self.conflicting:
            first, second = self.conflicting[0]
            lines.append(
                f"warning: {len(self.conflicting)} {kind} problems repeat a question with another gold answer, such as {second.id}: "
                f"{printable(second.answer[:40])}, where {first.id} has {printable(first.answer[:40])}; keep the right one, or "
                "data.….unique=true the first"
            )
        return lines


def check_golds(problems: Sequence[Problem]) -> GoldCheck:
    """Grade every gold answer against itself: what ``data check``, ``preflight`` and ``run`` say of gold answers."""
    check = GoldCheck(repeated=sum(n - 1 for n in Counter(p.question for p in problems).values()))
    first: dict[str, Problem] = {}
    for problem in problems:
        earlier = first.setdefault(problem.question, problem)
        if earlier.answer != problem.answer and not grade(problem.answer, earlier.answer).correct:
            check.conflicting.append((earlier, problem))
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
        if _OTHERWISE.fullmatch(problem.answer):
            check.grouped.append(problem)
    return check


def _is_prose(gold: str) -> bool:
    """Return whether a gold answer is several words, which only the same words equal."""
    words = re.findall(r"[^\W\d_]{2,}", re.sub(r"\\[a-zA-Z]+", " ", clean(gold) or ""))
    return len(words) >= 2 and numeric_value(gold) is None
