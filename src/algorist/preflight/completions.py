"""What a model writes at GRPO's sampling settings: right answers, useful groups, variety, tags, rewards that fail."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Sequence
from statistics import mean
from typing import Any

from algorist.config.schema import Recipe
from algorist.diagnosis.signals import END_OF_TURN
from algorist.errors import AlgoristError, RewardError
from algorist.grading import grade_completion
from algorist.models.load import Policy
from algorist.preflight.passrates import GROUP_SIZES, fit_pass_rates
from algorist.prompts import PromptFormat
from algorist.prompts.chat import encode_prompt, render_prompt
from algorist.rewards import build_rewards
from algorist.rewards.user import BOUND, BatchReward
from algorist.rollouts import make_engine
from algorist.rollouts.base import Completion
from algorist.training.grpo_setup import sampling_params
from algorist.types import Problem

SHOWN = 5
"""Completions that are shown, all of the first problem: their differences are what a group learns from."""


def sample(
    recipe: Recipe, problems: Sequence[Problem], policy: Policy, form: PromptFormat, samples: int
) -> dict[str, Any]:
    """Sample completions and return pass rates, useful groups, variety, tags, rewards, truncation, reasons, speed.

    Raises:
        EngineError: The model cannot be sampled from.
    """
    section = recipe.grpo
    if section.engine == "vllm":
        section = section.model_copy(update={"engine": "auto"})
    params = sampling_params(section, recipe.seed)
    prompts = [encode_prompt(form, policy.tokenizer, p.question) for p in problems]
    policy.model.eval()
    began = time.perf_counter()
    groups = make_engine(section.engine, policy.model, policy.tokenizer).generate(prompts, samples, params)
    seconds = time.perf_counter() - began
    texts = [
        [str(policy.tokenizer.decode(c.token_ids, skip_special_tokens=True)) for c in group]
        for group in groups
    ]
    flat = [c for group in groups for c in group]
    tokens = sorted(len(c.token_ids) for c in flat)
    right, reasons, shown = _graded(recipe, problems, texts, form)
    rates = fit_pass_rates(right, samples)
    return {
        "problems": len(problems),
        "samples": samples,
        "temperature": section.temperature,
        "pass_rate": sum(right) / len(flat),
        "all_right": sum(k == samples for k in right) / len(right),
        "all_wrong": sum(k == 0 for k in right) / len(right),
        "useful_share": {str(g): round(rates.useful_share(g), 3) for g in GROUP_SIZES},
        "truncated": sum(c.finish_reason == "length" for c in flat) / len(flat),
        "reasons": dict(reasons.most_common()),
        "tokens_mean": sum(tokens) / len(tokens),
        "tokens": tokens,
        "tokens_per_second": sum(tokens) / seconds,
        "per_problem": {p.id: k / samples for p, k in zip(problems, right, strict=True)},
        "shown": shown,
        **_texts(texts, groups, form),
        "rewards": _rewarded(recipe, problems, groups, texts, policy, form),
    }


def _graded(
    recipe: Recipe, problems: Sequence[Problem], texts: Sequence[Sequence[str]], form: PromptFormat
) -> tuple[list[int], Counter[str], list[dict[str, str]]]:
    """Return right completions per problem, grading reasons, and a few completions to look at."""
    right: list[int] = []
    reasons: Counter[str] = Counter()
    shown: list[dict[str, str]] = []
    for problem, group in zip(problems, texts, strict=True):
        correct = 0
        for text in group:
            try:
                grade = grade_completion(
                    text, problem.answer, parsed=form.parse(text), matcher=recipe.matcher
                )
                reason, correct = grade.reason, correct + grade.correct
            except AlgoristError as error:
                reason = str(error)[:60]  # type: ignore[assignment]
            reasons[reason] += 1
            if len(shown) < SHOWN and problem is problems[0]:
                shown.append({"completion": text, "gold": problem.answer, "reason": reason})
        right.append(correct)
    return right, reasons, shown


def _texts(
    texts: Sequence[Sequence[str]], groups: Sequence[Sequence[Completion]], form: PromptFormat
) -> dict[str, Any]:
    """Return how different the completions of a group are, and which tags they hold.

    A tag is looked for in completions that ended by themselves: those that were cut off may only not have come to it.
    """
    flat = [text for group in texts for text in group]
    ended = [
        text
        for group, found in zip(texts, groups, strict=True)
        for text, completion in zip(group, found, strict=True)
        if completion.finish_reason == "stop"
    ]
    tags = form.tags.all()
    if form.prefilled_start and form.tags.reasoning_open:
        tags = tuple(tag for tag in tags if tag != form.tags.reasoning_open)
    return {
        "identical_groups": sum(len(set(group)) == 1 for group in texts) / len(texts),
        "distinct": mean(len(set(group)) / len(group) for group in texts),
        "ended": len(ended),
        "tags": {tag: sum(tag in text for text in ended) / max(1, len(ended)) for tag in tags},
        "well_formed": sum(form.parse(text).well_formed for text in flat) / len(flat),
        "broken_characters": sum("�" in text for text in flat) / len(flat),
        "end_of_turn_as_text": sum(END_OF_TURN.search(text) is not None for text in flat) / len(flat),
    }


def _rewarded(
    recipe: Recipe,
    problems: Sequence[Problem],
    groups: Sequence[Sequence[Completion]],
    texts: Sequence[Sequence[str]],
    policy: Policy,
    form: PromptFormat,
) -> dict[str, dict[str, Any]]:
    """Return for each reward its mean, how often it failed and how first; the columns are those of training."""
    rows = [
        (problem, completion, text)
        for problem, group, written in zip(problems, groups, texts, strict=True)
        for completion, text in zip(group, written, strict=True)
    ]
    found: dict[str, dict[str, Any]] = {}
    for reward in build_rewards(recipe.rewards, form, matcher=recipe.matcher):
        if isinstance(reward.reward, BatchReward) and set(BOUND) & set(
            inspect.signature(reward.reward.function).parameters
        ):
            continue  # it asks for what only a trainer has
        hangs = ""
        values: list[float | None] = []
        try:
            values = reward(
                [render_prompt(form, policy.tokenizer, problem.question) for problem, _, _ in rows],
                [text for _, _, text in rows],
                completion_ids=[completion.token_ids for _, completion, _ in rows],
                answer=[problem.answer for problem, _, _ in rows],
                question=[problem.question for problem, _, _ in rows],
                problem_id=[problem.id for problem, _, _ in rows],
            )
        except RewardError as error:
            hangs = str(error)
        known = [value for value in values if value is not None]
        found[reward.__name__] = {
            "mean": mean(known) if known else None,
            "failures": reward.failures,
            "completions": len(rows),
            "first_failure": hangs or reward.first_failure,
            "hangs": bool(hangs),
            "low": reward.low,
        }
    return found
