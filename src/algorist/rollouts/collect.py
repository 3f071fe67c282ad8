"""Prompts become graded, rewarded completions here and nowhere else: training, evaluation, preflight and ``solve`` call it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from algorist.errors import EngineError
from algorist.prompts.chat import render_prompt
from algorist.rollouts.base import Completion, Completions, RolloutEngine, SamplingParams, Turns
from algorist.types import ENVIRONMENT, Group, Problem, Rollout
from algorist_grader import grade_completion

if TYPE_CHECKING:
    from algorist.prompts import PromptFormat
    from algorist.rewards import RewardSet


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
        extra: What the trainer offers to rewards that ask for it by name, such as ``trainer_state``.

    Returns:
        P groups in the order of the problems.

    Raises:
        EngineError: The engine returned another number of groups or completions than it was asked for.
        RewardError: A reward cannot be used any more.
    """
    prompts = [render_prompt(prompt_format.of(p), tokenizer, p.question) for p in problems]
    prompt_ids = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    sizes = [group_size] * len(problems) if isinstance(group_size, int) else list(group_size)
    began = time.perf_counter()
    source = prompt_format.turns

    def turns(places: Sequence[int], size: int) -> Turns | None:
        rows = [problems[place] for place in places for _ in range(size)]
        return (
            source.open(rows, tokenizer, prompt_format, sampling.stop_strings) if source is not None else None
        )

    sampled = _sample(engine, prompt_ids, sizes, sampling, turns)
    seconds = time.perf_counter() - began
    groups = [
        Group(
            problem,
            prompt,
            ids,
            [_read(c, prompt, tokenizer, prompt_format, sampling) for c in completions],
            seconds,
        )
        for problem, prompt, ids, completions in zip(problems, prompts, prompt_ids, sampled, strict=True)
    ]
    if graded:
        groups = [_with_grades(group, matcher) for group in groups]
    return groups if rewards is None else rewards.pay(groups, extra)


def _sample(
    engine: RolloutEngine,
    prompts: Sequence[list[int]],
    sizes: Sequence[int],
    sampling: SamplingParams,
    turns: Callable[[Sequence[int], int], Turns | None],
) -> Completions:
    """Return the completions of each prompt; prompts with the same group size are sampled in one call, in their order."""
    result: Completions = [[] for _ in prompts]
    for size in dict.fromkeys(sizes):
        places = [place for place, number in enumerate(sizes) if number == size]
        replies = turns(places, size)
        more = () if replies is None else (replies,)
        made = engine.generate([prompts[place] for place in places], size, sampling, *more)
        own = f"engine '{getattr(engine, 'name', type(engine).__name__)}' returned"
        expected = f"expected {len(places)} groups of {size} completions"
        if not _are_completions(made):
            raise EngineError(
                f"{own} {type(made).__name__} {str(made)[:80]}; {expected} (algorist.rollouts.base)"
            )
        if len(made) != len(places) or any(len(group) != size for group in made):
            raise EngineError(f"{own} groups of sizes {[len(group) for group in made]}; {expected}")
        for place, group in zip(places, made, strict=True):
            result[place] = list(group)
    return result


def _are_completions(made: Any) -> bool:
    """Return whether an engine, which may be a user's, returned lists of completions."""
    groups = made if isinstance(made, (list, tuple)) else [None]
    return all(isinstance(g, (list, tuple)) and all(isinstance(c, Completion) for c in g) for g in groups)


def _read(
    completion: Completion, prompt: str, tokenizer: Any, prompt_format: PromptFormat, sampling: SamplingParams
) -> Rollout:
    ids, first = completion.token_ids, _last_part(completion)
    text = str(tokenizer.decode(ids[first:], skip_special_tokens=True))
    # Only what was sampled since the last reply can end a row; the token that completes a stop string may have more text after it.
    replied = max((i for i, own in enumerate(completion.sampled or (), start=1) if not own), default=first)
    start = len(str(tokenizer.decode(ids[first:replied], skip_special_tokens=True)))
    ends = [text.index(stop, start) + len(stop) for stop in sampling.stop_strings if stop in text[start:]]
    text = text[: min(ends)] if ends else text
    return Rollout(
        completion_ids=list(completion.token_ids),
        text=text,
        log_probs=None if completion.log_probs is None else list(completion.log_probs),
        truncated=completion.finish_reason == "length",
        parsed=prompt_format.read(text, prompt),
        sampled=completion.sampled,
        turns=completion.turns,
    )


def _last_part(completion: Completion) -> int:
    """Find the first token after the environment's last reply: tokens from it on are graded, the parts before are turns."""
    sources = [turn.source for turn in completion.turns]
    if completion.sampled is None or ENVIRONMENT not in sources:
        return 0
    own = completion.sampled
    ends = [i for i in range(1, len(own) + 1) if not own[i - 1] and (i == len(own) or own[i])]
    # Every reply but one that ended the row is a run of tokens.
    return max((end for end, source in zip(ends, sources, strict=False) if source == ENVIRONMENT), default=0)


def _with_grades(group: Group, matcher: str) -> Group:
    columns, gold = group.problem.columns(), group.problem.answer
    grades = [
        grade_completion(r.text, gold, parsed=r.parsed, matcher=matcher, problem=columns)
        for r in group.rollouts
    ]
    return replace(group, rollouts=[replace(r, grade=g) for r, g in zip(group.rollouts, grades)])
