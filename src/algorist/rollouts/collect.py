"""Prompts become graded, rewarded completions here and nowhere else: training, evaluation, preflight and ``solve`` call it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from algorist.errors import EngineError
from algorist.grading import grade_completion
from algorist.prompts import PromptFormat
from algorist.prompts.chat import render_prompt
from algorist.rewards import RewardBreakdown, RewardSet
from algorist.rollouts.base import Completion, Completions, RolloutEngine, SamplingParams
from algorist.types import Group, Problem, Rollout


def collect(
    engine: RolloutEngine,
    tokenizer: Any,
    problems: Sequence[Problem],
    prompt_format: PromptFormat,
    sampling: SamplingParams,
    group_size: int | Sequence[int],
    *,
    rewards: RewardSet | None = None,
    matcher: str = "symbolic",
    graded: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> list[Group]:
    """Sample completions for each problem; parse, grade and reward each of them once.

    Args:
        engine: Samples groups of completions for token-id prompts.
        tokenizer: Renders prompts and decodes completions.
        problems: P problems.
        prompt_format: Renders questions and parses completions.
        sampling: How completions are sampled; a completion is cut after the first of its ``stop_strings``.
        group_size: Completions per problem: one number, or P of them.
        rewards: Rewards of the recipe; None computes none.
        matcher: How answers are compared with the gold answers.
        graded: Whether the problems have gold answers to grade against.
        extra: More columns for rewards that ask for them by name, such as ``trainer_state``.

    Returns:
        P groups in the order of the problems.

    Raises:
        EngineError: The engine returned another number of groups or completions than it was asked for.
        RewardError: A reward cannot be used any more.
    """
    prompts = [render_prompt(prompt_format, tokenizer, problem.question) for problem in problems]
    prompt_ids = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    sizes = [group_size] * len(problems) if isinstance(group_size, int) else list(group_size)
    began = time.perf_counter()
    sampled = _sample(engine, prompt_ids, sizes, sampling)
    seconds = time.perf_counter() - began
    groups = [
        Group(problem, prompt, ids, [_read(c, tokenizer, prompt_format, sampling) for c in found], seconds)
        for problem, prompt, ids, found in zip(problems, prompts, prompt_ids, sampled, strict=True)
    ]
    if graded:
        groups = [_with_grades(group, matcher) for group in groups]
    return groups if rewards is None else _with_rewards(groups, rewards, dict(extra or {}))


def _sample(
    engine: RolloutEngine, prompts: Sequence[list[int]], sizes: Sequence[int], sampling: SamplingParams
) -> Completions:
    """Return the completions of each prompt; prompts with the same group size are sampled in one call, in their order."""
    result: Completions = [[] for _ in prompts]
    for size in dict.fromkeys(sizes):
        places = [place for place, wanted in enumerate(sizes) if wanted == size]
        found = engine.generate([prompts[place] for place in places], size, sampling)
        if len(found) != len(places) or any(len(group) != size for group in found):
            raise EngineError(
                f"engine '{getattr(engine, 'name', type(engine).__name__)}' returned groups of sizes "
                f"{[len(group) for group in found]}; expected {len(places)} groups of {size} completions"
            )
        for place, group in zip(places, found, strict=True):
            result[place] = list(group)
    return result


def _read(
    completion: Completion, tokenizer: Any, prompt_format: PromptFormat, sampling: SamplingParams
) -> Rollout:
    text = str(tokenizer.decode(completion.token_ids, skip_special_tokens=True))
    # The token that completes a stop string may have more text after it.
    ends = [text.index(stop) + len(stop) for stop in sampling.stop_strings if stop in text]
    text = text[: min(ends)] if ends else text
    return Rollout(
        completion_ids=list(completion.token_ids),
        text=text,
        log_probs=None if completion.log_probs is None else list(completion.log_probs),
        truncated=completion.finish_reason == "length",
        parsed=prompt_format.parse(text),
    )


def _with_grades(group: Group, matcher: str) -> Group:
    columns, gold = group.problem.columns(), group.problem.answer
    grades = [
        grade_completion(r.text, gold, parsed=r.parsed, matcher=matcher, problem=columns)
        for r in group.rollouts
    ]
    return replace(group, rollouts=[replace(r, grade=g) for r, g in zip(group.rollouts, grades)])


def _with_rewards(groups: list[Group], rewards: RewardSet, extra: dict[str, Any]) -> list[Group]:
    rows = [(group, rollout) for group in groups for rollout in group.rollouts]
    # Rewards see every field of a problem, and every further column of its data set's row.
    columns = [group.problem.columns() for group, _ in rows]
    names = dict.fromkeys(name for row in columns for name in row)
    scores = iter(
        rewards.score(
            [rollout.text for _, rollout in rows],
            parsed=[rollout.parsed for _, rollout in rows],
            prompts=[group.prompt for group, _ in rows],
            completion_ids=[rollout.completion_ids for _, rollout in rows],
            **{name: [row.get(name) for row in columns] for name in names},
            **extra,
        )
    )
    return [
        replace(group, rollouts=[_rewarded(rollout, next(scores)) for rollout in group.rollouts])
        for group in groups
    ]


def _rewarded(rollout: Rollout, score: RewardBreakdown) -> Rollout:
    applies = any(value is not None for value in score.components.values())
    return replace(rollout, rewards=dict(score.components), reward=score.total if applies else None)
