"""From a dataset section of a recipe to problems: load, filter, shuffle, cut."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from algorist.config.schema import DatasetSection
from algorist.data.base import DATASETS, Source
from algorist.data.files import SUFFIXES
from algorist.data.pass_rates import read_table, within
from algorist.errors import DataError, GradingError
from algorist.grading import grade, grade_many, hash_answer, last_boxed, numeric_value
from algorist.grading.checkers import ask
from algorist.types import Problem

log = logging.getLogger("algorist.data")


def load_problems(
    section: DatasetSection, *, prompt_tokens: Callable[[Problem], int] | None = None
) -> list[Problem]:
    """Load the problems that a dataset section describes.

    Args:
        section: Adapter, source, filters and limit.
        prompt_tokens: Length of a problem's prompt in tokens; needed for the prompt-length filters.

    Raises:
        DataError: Unreadable source, or no problem left after the filters (the message says which filter took all).
    """
    source = Source(section.split, section.path, section.hub, section.subset, section.columns, section.params)
    if section.name not in DATASETS and Path(section.name).suffix.lower() in SUFFIXES:
        raise DataError(
            f"the dataset's name is '{section.name}', a file; write name: local and path: {section.name} "
            f"(data.train.name=local data.train.path={section.name})"
        )
    problems = DATASETS.get(section.name)(source)
    if code := next((p for p in problems if ".py:" in p.checker and not section.checker), None):
        raise DataError(
            f"dataset '{section.name}': problem {code.id} names code to run, checker '{code.checker[:200]}'; rows may name registered "
            "checkers only. Read that code, then say it yourself: data.….checker=FILE.py:FUNCTION"
        )
    if section.checker is not None:
        problems = [replace(p, checker=section.checker) for p in problems]
    _try_checkers(problems, section.name)
    if section.numeric_answers_only:
        problems = _numeric(problems, section.name)
    if section.correct_only:
        problems = _correct(problems, section.name)
    if section.pass_rate is not None:
        if section.pass_rates is None:
            raise DataError(
                "pass_rate is set without pass_rates, the table to filter by; make one: algorist data rate RECIPE"
            )
        table = read_table(Path(section.pass_rates).expanduser())
        problems = within(problems, section.pass_rate, table, section.name)
    if section.unique:
        once = list({p.question: p for p in reversed(problems)}.values())[::-1]
        _say_left_out(section.name, len(problems), len(once), "they repeat a question")
        problems = once
    if section.shuffle_seed is not None:
        random.Random(section.shuffle_seed).shuffle(problems)
    if prompt_tokens is not None:
        problems = _by_length(problems, section, prompt_tokens)
    if section.limit is not None:
        problems = problems[: section.limit]
    if not problems:
        raise DataError(
            f"dataset '{section.name}' ({section.path or section.split}) is empty; expected at least one problem"
        )
    return problems


def _try_checkers(problems: list[Problem], dataset: str) -> None:
    """Ask each checker of a user's about one gold answer: what it lacks is said now, not in the middle of a run."""
    first = {p.checker: p for p in reversed(problems) if p.checker not in ("", dataset)}
    for name, problem in first.items():
        try:
            told = ask(name, problem.columns(), problem.answer)
        except GradingError as error:
            raise DataError(f"dataset '{dataset}': checker '{name}': {error}") from None
        if told.error:
            raise DataError(
                f"dataset '{dataset}': checker '{name}' fails on the gold answer {problem.answer[:80]!r} of problem {problem.id}: "
                f"{told.detail.partition(chr(10))[0] or told.error}. It is called as check(problem, answer), the problem's columns "
                f"by name ({', '.join(problem.columns())}), and returns True or False"
            )


def _numeric(problems: list[Problem], name: str) -> list[Problem]:
    kept = [p for p in problems if numeric_value(p.answer) is not None]
    _say_left_out(name, len(problems), len(kept), "their gold answer is no number")
    if not kept:
        raise DataError(
            f"numeric_answers_only leaves none of {len(problems)} problems; first gold answer: {problems[0].answer!r}"
        )
    return kept


def _say_left_out(name: str, before: int, after: int, why: str) -> None:
    if after < before:
        log.warning("dataset '%s': %d of %d problems are left out: %s", name, before - after, before, why)


def demonstrated_answer(problem: Problem) -> str | None:
    """Return the answer that a demonstration states itself: the response's, else the last box or ``####`` of the solution."""
    stated = problem.extra.get("demonstrated_answer")
    return stated or last_boxed(problem.solution) or hash_answer(problem.solution) or None


def _correct(problems: list[Problem], name: str) -> list[Problem]:
    """Keep demonstrations whose own answer is right, and say how many were left out and why."""
    stated = [(p, demonstrated_answer(p)) for p in problems]
    plain = iter(grade_many([(answer, p.answer) for p, answer in stated if not p.checker]))
    grades = [
        grade(answer, p.answer, problem=p.columns()) if p.checker else next(plain) for p, answer in stated
    ]
    kept = [p for p, verdict in zip(problems, grades, strict=True) if verdict.correct]
    silent = sum(answer is None for _, answer in stated)
    wrong = len(problems) - len(kept) - silent
    told = (
        f"correct_only: {len(kept)} of {len(problems)} demonstrations of '{name}' are right and kept; left out are {wrong} "
        f"with a wrong answer and {silent} that state none"
    )
    if not kept:
        raise DataError(
            f"{told}. Only datasets with solutions of their own (sft_jsonl, openmath_reasoning, rollouts, …) need it; leave "
            "correct_only out, or map the solution with data.….columns.solution"
        )
    log.warning("%s", told)
    return kept


def with_solutions(problems: list[Problem]) -> list[Problem]:
    """Return the problems that have a worked solution.

    Raises:
        DataError: None has one.
    """
    found = [p for p in problems if p.solution]
    if not found:
        raise DataError(
            f"SFT needs worked solutions, but none of {len(problems)} problems has one; map the column with "
            "data.sft.columns.solution=COLUMN, or leave SFT out: sft.enabled=false"
        )
    return found


def _by_length(
    problems: list[Problem], section: DatasetSection, prompt_tokens: Callable[[Problem], int]
) -> list[Problem]:
    if section.max_prompt_percentile is None and section.max_prompt_tokens is None:
        return problems
    lengths = [prompt_tokens(p) for p in problems]
    limit = section.max_prompt_tokens or max(lengths)
    if section.max_prompt_percentile is not None:
        position = (len(lengths) - 1) * section.max_prompt_percentile / 100
        ordered = sorted(lengths)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        limit = min(limit, int(ordered[low] + (ordered[high] - ordered[low]) * (position - low)))
    kept = [p for p, n in zip(problems, lengths, strict=True) if n <= limit]
    if not kept:
        raise DataError(
            f"no prompt has at most {limit} tokens (the shortest has {min(lengths)}); raise max_prompt_tokens"
        )
    _say_left_out(section.name, len(problems), len(kept), f"their prompts are longer than {limit} tokens")
    return kept
