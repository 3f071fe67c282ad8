"""From a dataset section of a recipe to problems: load, filter (also by a table of pass rates), shuffle, cut."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from algorist.config.schema import DatasetSection
from algorist.data.base import DATASETS, Source
from algorist.data.files import SUFFIXES
from algorist.errors import DAMAGED, DataError, GradingError
from algorist.types import PROBLEM_COLUMNS, Problem
from algorist_grader import grade, grade_many, hash_answer, last_boxed, numeric_value
from algorist_grader.checkers import ask, read_files_again

log = logging.getLogger("algorist.data.load")


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
            f"(data.….name=local data.….path={section.name})"
        )
    problems = _problems(DATASETS.get(section.name)(source), section.name)
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
        first: dict[str, Problem] = {}
        once = [first.setdefault(p.question, p) for p in problems if p.question not in first]
        _say_left_out(section.name, len(problems), len(once), "they repeat a question")
        problems = once
    if section.shuffle_seed is not None:
        random.Random(section.shuffle_seed).shuffle(problems)
    if prompt_tokens is not None:
        problems = by_length(problems, section, prompt_tokens)
    if section.limit is not None:
        problems = problems[: section.limit]
    if not problems:
        raise DataError(
            f"dataset '{section.name}' ({section.path or section.split}) is empty; expected at least one problem"
        )
    return problems


def _problems(rows: Any, dataset: str) -> list[Problem]:
    """List an adapter's problems; a user's own may have made something else (DataError)."""
    texts = ("id", *PROBLEM_COLUMNS)
    rows = list(rows) if isinstance(rows, Iterable) else [rows]
    for row in rows:
        wrong = [name for name in texts if not isinstance(getattr(row, name, None), str)]
        if wrong:
            raise DataError(
                f"dataset '{dataset}' made {ascii(row)[:200]}; expected a list of Problem, each field of it a text: "
                f"{', '.join(wrong)}"
            )
    questions = {row.id: row.question for row in rows}
    if twice := next((row for row in rows if questions[row.id] != row.question), None):
        raise DataError(
            f"dataset '{dataset}' has two questions with the id '{twice.id}': {twice.question[:60]!r} and {questions[twice.id][:60]!r}; "
            "expected an id of its own for each"
        )
    return rows


def _try_checkers(problems: list[Problem], dataset: str) -> None:
    """Ask each checker of a user's about one gold answer: what it lacks is said now, not in the middle of a run."""
    read_files_again()
    first = {p.checker: p for p in reversed(problems) if p.checker not in ("", dataset)}
    for name, problem in first.items():
        try:
            reply = ask(name, problem.columns(), problem.answer)
        except GradingError as error:
            raise DataError(f"dataset '{dataset}': checker '{name}': {error}") from None
        if reply.error:
            raise DataError(
                f"dataset '{dataset}': checker '{name}' fails on the gold answer {problem.answer[:80]!r} of problem {problem.id}: "
                f"{reply.detail.partition(chr(10))[0] or reply.error}. It is called as check(problem, answer), the problem's columns "
                f"by name ({', '.join(problem.columns())}), and returns True or False"
            )


def _numeric(problems: list[Problem], name: str) -> list[Problem]:
    numeric = [p for p in problems if numeric_value(p.answer) is not None]
    _say_left_out(name, len(problems), len(numeric), "their gold answer is no number")
    if not numeric:
        raise DataError(
            f"numeric_answers_only leaves none of {len(problems)} problems; first gold answer: {problems[0].answer!r}"
        )
    return numeric


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
    right = [p for p, verdict in zip(problems, grades, strict=True) if verdict.correct]
    silent = sum(answer is None for _, answer in stated)
    wrong = len(problems) - len(right) - silent
    summary = (
        f"correct_only: {len(right)} of {len(problems)} demonstrations of '{name}' are right and kept; left out are {wrong} "
        f"with a wrong answer and {silent} that state none"
    )
    if not right:
        raise DataError(
            f"{summary}. Only datasets with solutions of their own (sft_jsonl, openmath_reasoning, rollouts, …) need it; leave "
            "correct_only out, or map the solution with data.….columns.solution"
        )
    log.warning("%s", summary)
    return right


def with_solutions(problems: list[Problem], dataset: str = "sft") -> list[Problem]:
    """Return the problems that have a worked solution.

    Raises:
        DataError: None has one.
    """
    solved = [p for p in problems if p.solution]
    if not solved:
        raise DataError(
            f"SFT needs worked solutions, but none of {len(problems)} problems has one; map the column with "
            "data.sft.columns.solution=COLUMN, let a model write them (algorist data sample), or leave SFT out: sft.enabled=false"
        )
    _say_left_out(dataset, len(problems), len(solved), "they have no worked solution")
    return solved


def by_length(
    problems: list[Problem], section: DatasetSection, prompt_tokens: Callable[[Problem], int]
) -> list[Problem]:
    """Return the problems whose prompts, in tokens, pass the section's length filters (DataError: none does)."""
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
    short = [p for p, n in zip(problems, lengths, strict=True) if n <= limit]
    if not short:
        raise DataError(
            f"no prompt has at most {limit} tokens (the shortest has {min(lengths)}); raise max_prompt_tokens"
        )
    _say_left_out(section.name, len(problems), len(short), f"their prompts are longer than {limit} tokens")
    return short


def key_of(problem: Problem) -> str:
    """Return the key of a problem in a table: a hash of question, gold answer and checker, without its id."""
    checker = f"\0{problem.checker}" if problem.checker else ""
    return hashlib.sha256(f"{problem.question}\0{problem.answer}{checker}".encode()).hexdigest()[:16]


def read_table(path: Path) -> dict[str, Any]:
    """Return a table: ``model``, ``samples``, and ``problems``, key → ``id`` and ``right``, the samples that were right.

    Raises:
        DataError: It is missing or not such a table.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["samples"] < 1 or not all("right" in entry for entry in table["problems"].values()):
            raise KeyError("right")
    except OSError as error:
        raise DataError(
            f"no table of pass rates at {path} ({error.strerror}); make one: algorist data rate RECIPE"
        ) from None
    except DAMAGED:
        raise DataError(
            f"{path} is no table of pass rates; expected what algorist data rate writes: samples, and right for each problem"
        ) from None
    return dict(table)


def within(
    problems: Sequence[Problem], bounds: Sequence[float], table: Mapping[str, Any], name: str
) -> list[Problem]:
    """Return the problems whose pass rate lies within ``bounds``, both included; those without one are left out and counted.

    Raises:
        DataError: None is left.
    """
    rates = [
        entry["right"] / table["samples"] if (entry := table["problems"].get(key_of(p))) else None
        for p in problems
    ]
    inside = [
        p
        for p, rate in zip(problems, rates, strict=True)
        if rate is not None and bounds[0] <= rate <= bounds[1]
    ]
    known = [rate for rate in rates if rate is not None]
    summary = (
        f"pass_rate: {len(inside)} of {len(problems)} problems of '{name}' lie within {bounds[0]:g} and {bounds[1]:g}; "
        f"{sum(r < bounds[0] for r in known)} are harder, {sum(r > bounds[1] for r in known)} easier, "
        f"{len(problems) - len(known)} have no rate"
    )
    if not inside:
        raise DataError(f"{summary}. Widen data.….pass_rate, or rate this dataset: algorist data rate RECIPE")
    log.info("%s", summary)
    return inside
