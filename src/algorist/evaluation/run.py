"""The one evaluator: during training, after it, and on any model. Greedy, and sampled when asked.

Protocol: one greedy completion per problem; ``samples`` more at the stated temperature. Every completion is parsed by
the prompt format and graded by the same grader as the reward. The samples are plain rows; numbers with intervals come
from ``evaluation.estimators``. With ``progress`` an evaluation that was killed continues with the batches that are missing
and ends with the same samples: each batch draws with a seed of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from algorist.config.schema import EvalSection
from algorist.evaluation.progress import Progress
from algorist.evaluation.protocols import protocol_name
from algorist.grading import grade_completion
from algorist.prompts import PromptFormat
from algorist.prompts.chat import encode_prompt, render_prompt
from algorist.rewards import RewardSet
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
    stop_strings: tuple[str, ...] = ()

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
            tuple(section.stop_strings),
        )

    def recorded(self, prompt_format: PromptFormat) -> dict[str, Any]:
        """Return what an artifact says of the protocol: its name, the settings, the prompt format."""
        name = protocol_name(self.samples, self.temperature, self.top_p)
        settings = asdict(self) | {"stop_strings": list(self.stop_strings)}
        if not self.stop_strings:  # as artifacts without them say it
            del settings["stop_strings"]
        return {"name": name, **settings, "prompt_format": prompt_format.name}


def evaluate(
    engine: RolloutEngine,
    tokenizer: Any,
    problems: Sequence[Problem],
    prompt_format: PromptFormat,
    setting: EvaluationSetting,
    *,
    rewards: RewardSet | None = None,
    progress: Progress | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    greedy: bool = True,
) -> list[dict[str, Any]]:
    """Return one row per completion: the problem, the completion, its parse, its grade and its rewards.

    Args:
        engine: Any rollout engine.
        tokenizer: Renders prompts and decodes completions.
        problems: Held-out problems.
        prompt_format: Renders and parses.
        setting: Sampling and grading.
        rewards: The rewards of the recipe; their values go to ``rewards``, the weighted sum to ``reward``.
        progress: Keeps finished batches, and gives those of an evaluation that was killed.
        on_progress: Called with (problems done, problems in all) after each batch.
        greedy: Draw the greedy completion too; without it there are the sampled ones only.
    """
    rows: list[dict[str, Any]] = []
    for start in range(0, len(problems), setting.batch_size):
        batch = problems[start : start + setting.batch_size]
        found = progress.rows_at(start, batch) if progress else None
        if found is None:
            found = _batch(engine, tokenizer, batch, prompt_format, setting, start, greedy)
            if rewards:
                _reward(found, rewards)
            for row in found:
                del row["completion_ids"]
            if progress:
                progress.add(start, found)
        rows.extend(found)
        if on_progress:
            on_progress(min(start + len(batch), len(problems)), len(problems))
    return rows


def _batch(
    engine: RolloutEngine,
    tokenizer: Any,
    batch: Sequence[Problem],
    prompt_format: PromptFormat,
    setting: EvaluationSetting,
    start: int,
    greedy: bool,
) -> list[dict[str, Any]]:
    prompts = [encode_prompt(prompt_format, tokenizer, p.question) for p in batch]
    began = time.perf_counter()
    groups = [list(group) for group in _complete(engine, prompts, setting, start, greedy)]
    seconds = time.perf_counter() - began
    rows = []
    for problem, group in zip(batch, groups, strict=True):
        shared = {
            "prompt": render_prompt(prompt_format, tokenizer, problem.question),
            "seconds": seconds / len(batch) / len(group),
        }
        for index, completion in enumerate(group):
            row = _row(problem, index, completion, tokenizer, prompt_format, setting)
            rows.append(row | shared | {"greedy": greedy and index == 0})
    return rows


def _reward(rows: list[dict[str, Any]], rewards: RewardSet) -> None:
    """Add ``rewards`` and ``reward`` to rows; the rewards see the columns that they see in training."""
    scores = rewards.score(
        [row["completion"] for row in rows],
        prompts=[row["prompt"] for row in rows],
        answer=[row["gold"] for row in rows],
        question=[row["question"] for row in rows],
        problem_id=[row["problem_id"] for row in rows],
        completion_ids=[row["completion_ids"] for row in rows],
    )
    for row, score in zip(rows, scores, strict=True):
        row["rewards"] = {name: value for name, value in score.components.items() if value is not None}
        row["reward"] = score.total


def _complete(
    engine: RolloutEngine, prompts: list[list[int]], setting: EvaluationSetting, start: int, greedy: bool
) -> list[list[Completion]]:
    groups: list[list[Completion]] = [[] for _ in prompts]
    if greedy:
        one = SamplingParams(
            temperature=0.0,
            max_new_tokens=setting.max_completion_tokens,
            stop_strings=setting.stop_strings,
        )
        groups = engine.generate(prompts, 1, one)
    if setting.samples:
        sampled = SamplingParams(
            temperature=setting.temperature,
            top_p=setting.top_p,
            max_new_tokens=setting.max_completion_tokens,
            stop_strings=setting.stop_strings,
            seed=setting.seed + start,
        )
        more = engine.generate(prompts, setting.samples, sampled)
        groups = [[*first, *rest] for first, rest in zip(groups, more, strict=True)]
    return groups


def _row(
    problem: Problem,
    index: int,
    completion: Completion,
    tokenizer: Any,
    prompt_format: PromptFormat,
    setting: EvaluationSetting,
) -> dict[str, Any]:
    text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    text = _until_stop(text, setting.stop_strings)
    parsed = prompt_format.parse(text)
    grade = grade_completion(text, problem.answer, parsed=parsed, matcher=setting.matcher)
    return {
        "problem_id": problem.id,
        "sample": index,
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
        "dataset": problem.extra.get("dataset"),
        "completion_ids": completion.token_ids,
    }


def _until_stop(text: str, stop_strings: Sequence[str]) -> str:
    """Cut off what the token that ends a stop string has behind it."""
    ends = [text.index(stop) + len(stop) for stop in stop_strings if stop in text]
    return text[: min(ends)] if ends else text
