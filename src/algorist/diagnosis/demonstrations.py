"""Facts of SFT: what its demonstrations show, how often they were read, and what stayed of them on held-out problems."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from algorist.diagnosis.rule import Facts, Share, fact
from algorist.diagnosis.signals import NUMBER, same_number
from algorist.store.safe_text import one_line
from algorist.types import Problem
from algorist_grader.extract import last_number

ENOUGH_ROWS = 20
"""Problems that say enough."""
EARLIER = 0.2
"""Share of demonstrations that answer with an earlier number of their own solution; MATH's solutions do in 0.06."""
ALONE = 0.8
"""Share of demonstrations without steps that teaches to answer at once."""
PASSES, BY_HEART, UNSOLVED = 20.0, 0.98, 0.5
"""Passes over the demonstrations, accuracy of their tokens, and of held-out problems, that show what was learned by heart."""
HARDLY = 0.1
"""Share of held-out problems that are solved after demonstrations without steps; where it is more, they do."""
NEARLY = 0.8
"""Share of the shorter solutions that end in their answer, where the longest were cut."""
MOST = 0.5
"""Share of the demonstrations whose loss says more than that a few are long."""
CUT, LONG, ENDINGS = 0.2, 40, 5
"""Share of texts that end at one length without a sign, characters from which on that is no chance, and last words that no template has."""


def other_endings(problems: Sequence[Problem]) -> tuple[int, list[tuple[Problem, str]]]:
    """Count the problems with a number as answer and one in their solution; return those whose solution ends in another, with that."""
    finals = [
        (p, last_number(p.solution)) for p in problems if p.solution and same_number(p.answer, p.answer)
    ]
    known = [(problem, number) for problem, number in finals if number is not None]
    return len(known), [
        (problem, number) for problem, number in known if not same_number(number, problem.answer)
    ]


def absent_answers(problems: Sequence[Problem]) -> tuple[int, list[Problem]]:
    """Count the problems with a number as answer and one in their solution; return those whose solution holds the answer nowhere."""
    known = [
        (p, numbers)
        for p in problems
        if p.solution
        and same_number(p.answer, p.answer)
        and (numbers := NUMBER.findall(p.solution.replace("{,}", "").replace(",", "").replace("−", "-")))
    ]
    return len(known), [p for p, numbers in known if not any(same_number(n, p.answer) for n in numbers)]


def earlier_answers(demonstrations: Sequence[Problem]) -> str | None:
    """Count the demonstrations that answer with an earlier number of their solution than its last one; None where they are few."""
    count, others = other_endings(demonstrations)
    earlier = [
        (problem, last)
        for problem, last in others
        if any(same_number(n, problem.answer) for n in NUMBER.findall(str(problem.solution).replace(",", "")))
    ]
    if count < ENOUGH_ROWS or len(earlier) < EARLIER * count:
        return None
    problem, last = earlier[0]
    return (
        f"{len(earlier)} of {count} demonstrations answer with an earlier number of their solution, such as "
        f"{one_line(problem.answer, 20)} where it ends in {last}"
    )


def answers_alone(demonstrations: Sequence[Problem]) -> str | None:
    """Count the demonstrations whose solution is a number and no more; None where they are few."""
    alone = [p for p in demonstrations if NUMBER.fullmatch(str(p.solution or "").strip().replace(",", ""))]
    if len(alone) < max(ENOUGH_ROWS, ALONE * len(demonstrations)):
        return None
    return f"{len(alone)} of {len(demonstrations)} demonstrations are a number without steps, such as {one_line(str(alone[0].solution), 20)}"


def cut_questions(problems: Sequence[Problem]) -> str | None:
    """Count the questions that end at one length within a sentence, with words of all kinds; None where they are few."""
    longest = max((len(p.question) for p in problems), default=0)
    cut = [p.question for p in problems if len(p.question) == longest and p.question[-1:].isalpha()]
    few = len(problems) < ENOUGH_ROWS or len(cut) < CUT * len(problems)
    if few or longest < LONG or len({question.split()[-1] for question in cut}) < ENDINGS:
        return None
    return f"{len(cut)} of {len(problems)} questions end in the middle after {longest} characters, such as: …{one_line(cut[0][-40:], 40)}"


def cut_solutions(demonstrations: Sequence[Problem]) -> str | None:
    """Count the solutions that end at one length before their answer, where shorter ones end in it; None where they are few."""
    solved = [p for p in demonstrations if p.solution and same_number(p.answer, p.answer)]
    full = max((len(p.solution or "") for p in solved), default=0) - 1  # a blank at the cut is stripped
    ends = [same_number(last_number(p.solution or ""), p.answer) for p in solved]
    cut = [p for p, right in zip(solved, ends, strict=True) if not right and len(p.solution or "") >= full]
    shorter = [right for p, right in zip(solved, ends, strict=True) if len(p.solution or "") < full]
    if (
        len(cut) < max(ENOUGH_ROWS, CUT * len(solved))
        or len(shorter) < ENOUGH_ROWS
        or sum(shorter) < NEARLY * len(shorter)
    ):
        return None
    return (
        f"{len(cut)} of {len(solved)} solutions end after {full + 1} characters, before their answer, such as: "
        f"…{one_line(str(cut[0].solution)[-40:], 40)}"
    )


def local_problems(run: Path | None, part: str) -> list[Problem]:
    """Return the problems of ``data.train`` or ``data.sft`` of a run where they are a local file that can still be read."""
    from algorist.config.load import load_recipe
    from algorist.data.load import load_problems
    from algorist.errors import AlgoristError
    from algorist.store.run_log import without_warnings

    if run is None:
        return []
    try:
        section = getattr(load_recipe(str(run / "config.yaml"), []).recipe.data, part)
        local = section is not None and section.path and Path(section.path).is_file()
        with without_warnings():
            return list(load_problems(section)) if local else []
    except (AlgoristError, OSError, ValueError):
        return []


@fact("{}", "demonstrations")
def _demonstrations(f: Facts) -> list[Problem]:
    """Return SFT's demonstrations, as far as they are a local file."""
    if not f.settings.get("sft.enabled"):
        return []
    return local_problems(f.signals.run, "sft" if f.settings.get("data.sft") else "train")


@fact("{}")
def left_out(f: Facts) -> str | None:
    """Count the demonstrations that were too long, as the run's log counts them; None where they are few."""
    log = f.signals.run and f.signals.run / "training.log"
    text = log.read_text("utf-8", errors="replace") if log and log.is_file() else ""
    counts = re.findall(r"(\d+) of (\d+) demonstrations are longer than (sft\.max_length=\d+)", text)
    if not counts or int(counts[-1][0]) < MOST * int(counts[-1][1]):
        return None
    return "{} of {} demonstrations are longer than {} tokens".format(*counts[-1])


@fact("the demonstrations were read {:.0f} times")
def passes(f: Facts) -> float | None:
    return max((epoch for _, epoch in f.signals.series("epoch", f.stage)), default=None)


@fact("{} of their tokens are predicted rightly")
def token_accuracy(f: Facts) -> Share | None:
    series = f.signals.series("mean_token_accuracy", f.stage)
    return Share(series[-1][1]) if series else None


def learned_by_heart(f: Facts) -> bool:
    return f["passes"] >= PASSES and f["token_accuracy"] >= BY_HEART and f["held_out"] < UNSOLVED


def answers_without_steps(f: Facts) -> bool:
    return bool(f["answers_alone"]) and f["held_out"] <= HARDLY
