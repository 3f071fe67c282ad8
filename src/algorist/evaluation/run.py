"""The one evaluator: during training, after it, and on any model. Greedy, and sampled when asked.

Protocol: one greedy completion per problem; ``samples`` more at the stated temperature. Every completion is parsed by
the prompt format and graded by the same grader as the reward. The samples are plain rows; numbers with intervals come
from ``evaluation.estimators``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from algorist.config.schema import EvalSection
from algorist.grading import grade_completion
from algorist.prompts import PromptFormat
from algorist.prompts.chat import encode_prompt
from algorist.rollouts.base import Completion, RolloutEngine, SamplingParams
from algorist.types import Problem


@dataclass(frozen=True, slots=True)
class EvaluationSetting:
    """How completions are drawn and graded; recorded beside the numbers."""

    samples: int
    temperature: float
    top_p: float
    max_completion_tokens: int
    batch_size: int
    matcher: str
    seed: int

    @classmethod
    def from_section(
        cls, section: EvalSection, *, max_tokens: int, matcher: str, seed: int
    ) -> EvaluationSetting:
        """Return the setting of a recipe's ``eval`` section."""
        return cls(
            section.samples,
            section.temperature,
            section.top_p,
            section.max_completion_tokens or max_tokens,
            section.batch_size,
            matcher,
            seed,
        )


def evaluate(
    engine: RolloutEngine,
    tokenizer: Any,
    problems: Sequence[Problem],
    prompt_format: PromptFormat,
    setting: EvaluationSetting,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Return one row per completion: the problem, the completion, its parse and its grade.

    Args:
        engine: Any rollout engine.
        tokenizer: Renders prompts and decodes completions.
        problems: Held-out problems.
        prompt_format: Renders and parses.
        setting: Sampling and grading.
        on_progress: Called with (problems done, problems in all) after each batch.
    """
    rows: list[dict[str, Any]] = []
    for start in range(0, len(problems), setting.batch_size):
        batch = problems[start : start + setting.batch_size]
        prompts = [encode_prompt(prompt_format, tokenizer, p.question) for p in batch]
        began = time.perf_counter()
        groups = [list(group) for group in _complete(engine, prompts, setting, start)]
        seconds = time.perf_counter() - began
        for problem, group in zip(batch, groups, strict=True):
            rows.extend(
                _row(
                    problem,
                    index,
                    completion,
                    tokenizer,
                    prompt_format,
                    setting,
                    seconds / len(batch) / len(group),
                )
                for index, completion in enumerate(group)
            )
        if on_progress:
            on_progress(min(start + len(batch), len(problems)), len(problems))
    return rows


def _complete(
    engine: RolloutEngine, prompts: list[list[int]], setting: EvaluationSetting, start: int
) -> list[list[Completion]]:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=setting.max_completion_tokens)
    groups = engine.generate(prompts, 1, greedy)
    if setting.samples:
        sampled = SamplingParams(
            temperature=setting.temperature,
            top_p=setting.top_p,
            max_new_tokens=setting.max_completion_tokens,
            seed=setting.seed + start,
        )
        more = engine.generate(prompts, setting.samples, sampled)
        groups = [[*one, *rest] for one, rest in zip(groups, more, strict=True)]
    return groups


def _row(
    problem: Problem,
    index: int,
    completion: Completion,
    tokenizer: Any,
    prompt_format: PromptFormat,
    setting: EvaluationSetting,
    seconds: float,
) -> dict[str, Any]:
    text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    parsed = prompt_format.parse(text)
    grade = grade_completion(text, problem.answer, parsed=parsed, matcher=setting.matcher)
    return {
        "problem_id": problem.id,
        "sample": index,
        "greedy": index == 0,
        "question": problem.question,
        "gold": problem.answer,
        "completion": text,
        "extracted": grade.extracted,
        "correct": grade.correct,
        "reason": grade.reason,
        "well_formed": parsed.well_formed,
        "has_reasoning": parsed.reasoning is not None,
        "reasoning_characters": len(parsed.reasoning or ""),
        "tokens": len(completion.token_ids),
        "truncated": completion.finish_reason == "length",
        "subject": problem.subject,
        "level": problem.level,
        "seconds": seconds,
    }
