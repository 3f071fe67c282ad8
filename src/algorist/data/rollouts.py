"""Demonstrations from a run's own rollouts: the reasoning of right completions (rejection sampling, expert iteration)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from algorist.config.load import load_run_recipe
from algorist.config.section import Section
from algorist.data.base import Source, dataset, read_params
from algorist.data.load import load_problems
from algorist.errors import CheckpointError, DataError
from algorist.prompts import PromptFormat, get_format
from algorist.prompts.base import TURN_SOURCES
from algorist.store.read import rollouts
from algorist.types import Problem

log = logging.getLogger("algorist.data.rollouts")


class _Params(Section, strict=True):
    run: str | Path | None = None
    correct: bool = True
    min_reward: float | None = None
    per_problem: int | None = Field(None, ge=1)
    order: Literal["shortest", "first", "best"] = "shortest"
    well_formed: bool = True
    truncated: bool = False


@dataset("rollouts")
def load_rollouts(source: Source) -> list[Problem]:
    """The rollouts of a run as demonstrations; params: ``run`` (its folder), ``correct`` (true), ``min_reward``, …

    A completion that the grader found right gives a problem whose solution is its reasoning and whose demonstrated answer is
    its own. ``min_reward`` asks for a total reward as well, ``correct: false`` drops the grader's verdict, ``well_formed``
    (true) keeps completions that follow the run's prompt format exactly, ``truncated`` (false) those that were cut off.
    ``per_problem`` keeps at most that many different ones per problem, by ``order``: shortest (in tokens), first or best
    (reward). The questions come from the run's own training data.
    """
    params = read_params({"run": source.path} | source.params, _Params, "rollouts")
    if not params.run:
        raise DataError(
            "rollouts: data.….params.run is missing; give the folder of a run, such as run: runs/quickstart"
        )
    run = Path(params.run).expanduser()
    try:
        recipe = load_run_recipe(run)
    except CheckpointError as error:
        raise DataError(
            f"rollouts: {error}; give a run with rollouts, such as data.sft.params.run=runs/quickstart"
        ) from None
    sources = (TURN_SOURCES.get(name).of_recipe(recipe) for name in TURN_SOURCES)
    turns = next((source for source in sources if source is not None), None)
    form = replace(get_format(recipe.prompt.format, tags=recipe.prompt.tags), turns=turns)
    # Filters by a prompt's length, which want a tokenizer, come before the limit: the run may have others of the problems.
    known = {p.id: p for p in load_problems(recipe.data.train.model_copy(update={"limit": None}))}
    rows = _rollouts(run, params)
    by_problem: dict[str, list[tuple[dict[str, Any], str, str]]] = {}
    unreadable = repeated = strangers = 0
    seen: set[tuple[str, str, str]] = set()
    for row in rows:
        read = read_demonstration(row, form, strict=params.well_formed)
        if read is None:
            unreadable += 1
        elif row["problem_id"] not in known:
            strangers += 1
        elif (key := (row["problem_id"], *read)) in seen:
            repeated += 1
        else:
            seen.add(key)
            by_problem.setdefault(row["problem_id"], []).append((row, *read))
    if strangers:
        raise DataError(
            f"rollouts: {strangers} of {len(rows)} rollouts in {run} belong to problems that its data.train does not give "
            f"any more ('{recipe.data.train.path or recipe.data.train.name}'); restore that file, or change it back"
        )
    problems = [
        replace(
            known[identity],
            id=f"{identity}#{number}" if number else identity,
            solution=reasoning,
            extra={**known[identity].extra, "demonstrated_answer": answer},
        )
        for identity, demonstrations in by_problem.items()
        for number, (_, reasoning, answer) in enumerate(
            pick(demonstrations, params.order, params.per_problem)
        )
    ]
    summary = (
        f"rollouts of {run}: {len(problems)} demonstrations of {len(by_problem)} problems from {len(rows)} "
        f"{'right ' if params.correct else ''}completions; left out are {repeated} repeated and {unreadable} that do not "
        f"follow the format '{form.name}', or that an environment or a chat's tool answered"
    )
    if not problems:
        raise DataError(
            f"{summary}. Train longer, lower params.min_reward, or look at them: algorist inspect {run}"
        )
    log.warning("%s", summary)
    return problems


def _rollouts(run: Path, params: _Params) -> list[dict[str, Any]]:
    try:
        return rollouts(
            run,
            correct=True if params.correct else None,
            truncated=None if params.truncated else False,
            min_reward=params.min_reward,
            limit=None,
        )
    except CheckpointError as error:
        raise DataError(f"rollouts: {error}") from None


def read_demonstration(
    row: Mapping[str, Any], form: PromptFormat, *, strict: bool = True
) -> tuple[str, str] | None:
    """Return (reasoning, answer) of a row's completion, or None when it cannot be shown as a demonstration.

    After an environment's reply the completion is the last part alone, no answer to the question; a chat's tool leaves no marks in it.
    """
    turns = row.get("turns") or ()
    unmarked = bool(turns) and form.turns is not None and form.turns.replies(row["completion"]) is None
    if unmarked or any(turn["source"] == "environment" for turn in turns):
        return None
    parsed = form.read(row["completion"], row["prompt"] or "")
    reasoning = parsed.reasoning if any(form.tags.all()) else row["completion"].strip()
    if not reasoning or not parsed.answer or (strict and not parsed.well_formed):
        return None
    return reasoning, parsed.answer


def pick(
    demonstrations: list[tuple[dict[str, Any], str, str]], order: str, count: int | None
) -> list[tuple[dict[str, Any], str, str]]:
    """Return at most ``count`` of (row, reasoning, answer), in an order of ``rollouts``."""
    if order == "shortest":
        demonstrations = sorted(demonstrations, key=lambda item: item[0]["completion_tokens"])
    elif order == "best":
        demonstrations = sorted(demonstrations, key=lambda item: -(item[0]["reward"] or 0.0))
    return demonstrations[:count]
