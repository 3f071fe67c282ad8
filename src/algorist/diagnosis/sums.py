"""Facts of sums: results that demonstrations state and tools reply, against those that the sums have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

from algorist.diagnosis.demonstrations import ENOUGH_ROWS
from algorist.diagnosis.rule import Facts, fact
from algorist.diagnosis.signals import same_number
from algorist.store.read import query
from algorist.store.safe_text import one_line
from algorist.types import Problem
from algorist_grader.symbolic import reading

FALSE = 0.2
"""Share of worked solutions, or of a tool's replies, with a wrong result; of the solutions of GSM8K's test set 0.003 (rounded ones are right)."""
_NUMBER = r"\$?\d{1,40}(?:,\d{3}){0,12}(?:\.\d{1,40})?"
_SUM = rf"{_NUMBER}(?:(?:[ \t]*[-+*/×÷][ \t]*|[ \t]+x[ \t]+){_NUMBER})+"
_STATED = re.compile(
    rf"(?<![\w.,(^/*+×÷-])(?<![-+*/×÷(=x^] )(?<!\bof )(?<!\d )({_SUM})[ \t]*=[ \t]*(-?{_NUMBER})"
    r"(?![ \t]*[-+*/×÷^%\\]|\d|[.,]\d|[ \t]+\d|[ \t]*(?:r|R|rem|remainder|mod)\b)"
)
_ASKED = re.compile(rf"\s*-?{_SUM}\s*")
_REPLIED = re.compile(rf"\s*-?{_NUMBER}\s*")
_SIGNS = {r"\times": "*", r"\cdot": "*", r"\div": "/", "·": "*", "−": "-", r"\$": "$"}
LONGEST = 4000
"""Characters of a text that are read."""
KNOWN = {Fraction(number) for number in (0, 1, 2, 7, 12, 24, 30, 52, 60, 100, 365, 1000)}
"""Numbers that a solution may have without a question (half, a week, a dozen, percent, an hour)."""
WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
ROUNDED = Fraction(1, 10**6)
"""Relative error of floating-point arithmetic that is none."""


def stated_sums(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yield each sum of a text without brackets, the result that it states, and whether that is right (or rounds what is)."""
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    for each in _STATED.finditer(text):
        if (value := _value(each[1])) is not None:
            yield each[1], each[2], _is_near(value, each[2])


def _is_near(value: Fraction, text: str) -> bool:
    stated = text.replace(",", "").replace("$", "")
    decimals = len(stated.partition(".")[2])
    return abs(value - Fraction(stated)) <= max(Fraction(1, 2 * 10**decimals), abs(value) * ROUNDED)


def _value(text: str) -> Fraction | None:
    """Work out a sum as the grader reads it; None where it divides by 0."""
    tree = reading(text.replace("x", "*").replace("$", "")).tree
    return tree[1] if tree is not None and tree[0] == "num" else None


Worked = list[tuple[Problem, list[tuple[str, str, bool]]]]


def wrong_sums(demonstrations: Sequence[Problem]) -> str | None:
    """Count the worked solutions with a wrong result, or else with one that is used too early; None where they are few."""
    worked = [(p, [*stated_sums(str(p.solution or "")[:LONGEST])]) for p in demonstrations]
    return _wrong_results(worked) or _out_of_order(worked)


def _wrong_results(worked: Worked) -> str | None:
    wrong = [each for _, sums in worked for each in sums if not each[2]]
    count = sum(any(not right for *_, right in sums) for _, sums in worked)
    known = sum(bool(sums) for _, sums in worked)
    if known < ENOUGH_ROWS or count < FALSE * known:
        return None
    text, stated, _ = wrong[0]
    return f"{count} of {known} worked solutions state a wrong result, such as {one_line(f'{text} = {stated}', 60)}"


def _out_of_order(worked: Worked) -> str | None:
    """Count the solutions that compute with a number before a later sum results in it, and do not end in their answer."""
    several = [(problem, sums) for problem, sums in worked if len(sums) > 2]
    early = [used for problem, sums in several if (used := _used_early(problem, sums))]
    if len(several) < ENOUGH_ROWS or len(early) < FALSE * len(several):
        return None
    return f"{len(early)} of {len(several)} worked solutions use a result before the sum that has it, such as {early[0]}"


def _used_early(problem: Problem, sums: Sequence[tuple[str, str, bool]]) -> str | None:
    """Return a sum with an operand that a later one results in; the last one may be a check of the others."""
    results = [_plain(says) for _, says, _ in sums]
    if same_number(problem.answer, sums[-1][1]):
        return None
    last = {result: place for place, result in enumerate(results[:-1])}
    question = problem.question[:LONGEST].lower()
    had = {_plain(number) for number in re.findall(_NUMBER, question)} | KNOWN
    had |= {Fraction(WORDS.index(word)) for word in re.findall(r"[a-z]+", question) if word in WORDS}
    for place, (asks, says, _) in enumerate(sums):
        for number in {_plain(number) for number in re.findall(_NUMBER, asks)} - had:
            if last.get(number, -1) > place:
                later, result, _ = sums[last[number]]
                return one_line(f"{asks} = {says} before {later} = {result}", 80)
        had.add(results[place])
    return None


def _plain(number: str) -> Fraction:
    return Fraction(number.replace(",", "").replace("$", ""))


@fact("{}")
def wrong_replies(f: Facts) -> str | None:
    """Count the replies of tools to a sum that are another number; None where they are few, or no tool was called."""
    if (run := f.signals.run) is None:
        return None
    turns = "SELECT unnest(turns) AS turn FROM rollouts WHERE stage = 'grpo' AND len(turns) > 0 LIMIT 4000"
    rows = query(
        run, f"SELECT turn.request AS request, turn.reply AS reply, turn.error AS error FROM ({turns})"
    )
    return _wrong((row["request"], row["reply"]) for row in rows if not row["error"])


def _wrong(calls: Iterable[tuple[str | None, str | None]]) -> str | None:
    known, wrong = 0, []
    for request, reply in calls:
        asks, says = _ASKED.fullmatch(request or ""), _REPLIED.fullmatch(reply or "")
        if asks is None or says is None or (value := _value(asks[0])) is None:
            continue
        known += 1
        wrong += [] if _is_near(value, says[0].strip()) else [(asks[0].strip(), says[0].strip())]
    if known < ENOUGH_ROWS or len(wrong) < FALSE * known:
        return None
    return f"{len(wrong)} of {known} replies of the tools to a sum are another number, such as {wrong[0][1]} for {one_line(wrong[0][0], 40)}"
