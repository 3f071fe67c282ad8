"""Facts of gold answers and problems beside each other: what the model agrees on, and how training differs from the evaluation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import fmean, median

from algorist.diagnosis.course import ENOUGH_ROWS, rises
from algorist.diagnosis.evaluations import LOST, run_of
from algorist.diagnosis.facts import OF_THE_RUN
from algorist.diagnosis.rule import Facts, Share, fact
from algorist.diagnosis.signals import NUMBER
from algorist.errors import ConfigError
from algorist.store.read import query
from algorist.store.safe_text import one_line
from algorist.types import Problem

AGREED, DISPUTED, PAID = 4, 0.1, 0.5
"""Completions of a problem that agree, share of problems where they agree on what is called wrong, and the agreement of advantages
with correctness from which on rewards pay what the grader says, so that they did not teach it."""
OF_ALIKE, VARIED = 0.25, 0.7
"""Part that is called wrong of all problems with one answer, and the temperature below which one answer says little."""
ONE_WAY = 0.6
"""Share of disputed golds that differ in one way from what the model answers."""
WRITTEN, FEW = 0.3, 10
"""Difference of shares of gold answers in a form from which on they are written otherwise, of so many problems or more."""
OTHER_KIND = 0.5
"""Difference between problems (Cliff's delta, of 1) from which on they are of different kinds."""


@fact("{}")
def disputed_golds(f: Facts) -> str | None:
    """Count the problems whose later completions all give one answer, which is called wrong; None where they are few."""
    later = "step >= (SELECT (min(step) + max(step)) / 2 FROM rollouts WHERE stage = 'grpo')"
    rows = query(
        run_of(f),
        "SELECT problem_id, count(*) AS n, count(DISTINCT coalesce(extracted, '')) AS answers, any_value(extracted) AS answer, "
        f"any_value(gold) AS gold, bool_or(correct) AS correct FROM rollouts WHERE stage = 'grpo' AND {later} GROUP BY problem_id",
    )
    seen = [row for row in rows if row["n"] >= AGREED]
    alike = [r for r in seen if r["answers"] == 1 and r["answer"]]
    agreed = [r for r in alike if not r["correct"]]
    few = len(agreed) < max(3, DISPUTED * len(seen), OF_ALIKE * len(alike))
    if len(seen) < ENOUGH_ROWS or few or f.number("grpo.temperature", 1.0) < VARIED:
        return None
    if rises(f) or f["aligned"] < PAID:
        return None
    pairs = [(str(row["answer"]), str(row["gold"])) for row in agreed]
    way = in_one_way(pairs)
    answer, gold = (one_line(text, 20) for text in pairs[0])
    return (
        f"of {len(seen)} problems {len(agreed)} have one answer in all of their later completions, which is called wrong, "
        f"such as {answer} for {gold}" + (f"; {way}" if way else "")
    )


def in_one_way(pairs: Sequence[tuple[str, str]]) -> str | None:
    """Name the one way in which most gold answers differ from the model's: a difference, a ratio, the sign; None where in none.

    Args:
        pairs: The model's answer and the gold answer of each problem.
    """
    read = [(_number(answer), _number(gold)) for answer, gold in pairs]
    numbers = [(answer, gold) for answer, gold in read if answer is not None and gold is not None]
    if len(numbers) < max(3, ONE_WAY * len(pairs)):
        return None
    ways = {
        "the model's answer {:+g}": [round(gold - answer, 6) for answer, gold in numbers],
        "the model's answer × {:g}": [round(gold / answer, 6) for answer, gold in numbers if answer],
    }
    for says, values in ways.items():
        value, count = Counter(values).most_common(1)[0] if values else (0.0, 0)
        if count >= max(3, ONE_WAY * len(pairs)):
            return f"{count} gold answers are {says.format(value)}"
    return None


FORMS = {
    "in scientific notation": re.compile(r"\d[eE][-+]?\d"),
    "with a percent sign": re.compile(r"%"),
    "with words or a unit": re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}"),
    "with decimals of 0": re.compile(r"\d\.0+(?!\d)"),
    "with a comma": re.compile(r"\d,\d"),
}


@fact("{}")
def golds_apart(f: Facts) -> str | None:
    """Name the form in which training and held-out gold answers are written most differently; None where they are alike."""
    training, held_out = _problems(f)
    if min(len(training), len(held_out)) < FEW:
        return None
    shares = {
        name: tuple(Share(fmean(bool(form.search(p.answer)) for p in part)) for part in (training, held_out))
        for name, form in FORMS.items()
    }
    name = max(shares, key=lambda name: abs(shares[name][0] - shares[name][1]))
    first, second = shares[name]
    if abs(first - second) < WRITTEN:
        return None
    return f"gold answers {name}: {first} in training, {second} in the evaluation"


def golds_written_otherwise(f: Facts) -> bool:
    """Return whether they are, and held-out accuracy falls or is far from that of the rollouts: many forms are the same to the grader."""
    apart = f["held_out_errors"] <= LOST or f.get("held_out_apart")
    return bool(apart and f["golds_apart"])


@fact("{}")
def kinds(f: Facts) -> str | None:
    """Name what differs most between training and held-out problems; None where they are alike."""
    return apart(*_problems(f))


def _problems(f: Facts) -> list[list[Problem]]:
    """Return training and held-out problems of a run, of its rollouts and evaluations, up to 500 of each."""
    select = "SELECT DISTINCT question, gold FROM"
    parts = (
        f"{select} rollouts WHERE stage = 'grpo' ORDER BY hash(question) LIMIT 500",
        f"{select} (SELECT question, gold FROM {OF_THE_RUN}) ORDER BY hash(question) LIMIT 500",
    )
    read: list[list[Problem]] = [[], []]
    with suppress(ConfigError):  # of another program, without these columns
        for problems, part in zip(read, parts, strict=True):
            rows = query(run_of(f), part)
            problems += [Problem("", str(row["question"]), str(row["gold"])) for row in rows]
    return read


def _number(text: str) -> float | None:
    """Return the only number of a text."""
    numbers = NUMBER.findall(text.replace(",", ""))
    return float(numbers[0]) if len(numbers) == 1 else None


def _numbers(problem: Problem) -> list[float]:
    return [float(number) for number in NUMBER.findall(problem.question.replace(",", "").replace("-", " "))]


MEASURES: dict[str, Callable[[Problem], float | None]] = {
    "characters of a question": lambda p: float(len(p.question)),
    "numbers in a question": lambda p: float(len(_numbers(p))),
    "largest number in a question": lambda p: max(_numbers(p), default=None),
    "size of a gold answer": lambda p: None if (gold := _number(p.answer)) is None else abs(gold),
}
SHARES: dict[str, Callable[[Problem], bool]] = {
    "gold answers that are a number": lambda p: _number(p.answer) is not None,
    "gold answers below 0": lambda p: (_number(p.answer) or 0.0) < 0,
    "gold answers that are whole": lambda p: (_number(p.answer) or 0.5).is_integer(),
    "questions that ask": lambda p: "?" in p.question,
}


def apart(training: Sequence[Problem], held_out: Sequence[Problem]) -> str | None:
    """Return the measure that differs most between two kinds of problems, with both values; None where all are alike."""
    if min(len(training), len(held_out)) < ENOUGH_ROWS:
        return None
    differences: dict[str, float] = {}
    for name, measure in MEASURES.items():
        of = [[value for p in part if (value := measure(p)) is not None] for part in (training, held_out)]
        if min(map(len, of)) >= ENOUGH_ROWS:
            text = f"{name}: {median(of[0]):.4g} (median) in training, {median(of[1]):.4g} in the evaluation"
            differences[text] = _delta(*of)
    for name, holds in SHARES.items():
        first, second = (Share(fmean(map(holds, part))) for part in (training, held_out))
        differences[f"{name}: {first} in training, {second} in the evaluation"] = abs(first - second)
    most = max(differences, key=differences.__getitem__)
    return most if differences[most] >= OTHER_KIND else None


def _delta(first: Sequence[float], second: Sequence[float]) -> float:
    """Return |Cliff's delta|: how much more often one of the first is larger than one of the second than smaller, or the other way."""
    pairs = [(a > b) - (a < b) for a in first for b in second]
    return abs(sum(pairs) / len(pairs))
