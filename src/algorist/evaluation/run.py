"""The one evaluator: during training, after it, and on any model. Greedy, and sampled when asked.

Protocol: one greedy completion per problem; ``samples`` more at the stated temperature. Every completion is parsed by
the prompt format and graded by the same grader as the reward. The samples are plain rows; numbers with intervals come
from ``evaluation.estimators``. With ``progress`` an evaluation that was killed continues with the batches that are missing
and ends with the same samples: each batch draws with a seed of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from algorist.config.schema import EvalSection
from algorist.evaluation.progress import Progress
from algorist.evaluation.protocols import protocol_name
from algorist.prompts import PromptFormat
from algorist.rewards import RewardSet
from algorist.rollouts.base import RolloutEngine, SamplingParams
from algorist.rollouts.collect import collect
from algorist.store.rows import rows_of
from algorist.types import Group, Problem


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
        switches = (
            {"template_kwargs": dict(prompt_format.template_kwargs)} if prompt_format.template_kwargs else {}
        )
        return {"name": name, **settings, "prompt_format": prompt_format.name, **switches}


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
            groups = _collect(engine, tokenizer, batch, prompt_format, setting, start, greedy, rewards)
            found = [row for group in groups for row in _rows(group, greedy)]
            if progress:
                progress.add(start, found)
        rows.extend(found)
        if on_progress:
            on_progress(min(start + len(batch), len(problems)), len(problems))
    return rows


def _collect(
    engine: RolloutEngine,
    tokenizer: Any,
    batch: Sequence[Problem],
    prompt_format: PromptFormat,
    setting: EvaluationSetting,
    start: int,
    greedy: bool,
    rewards: RewardSet | None,
) -> list[Group]:
    """Return one group for each problem: the greedy completion first, then the sampled ones."""
    draws = [
        (1, SamplingParams(temperature=0.0)) if greedy else (0, None),
        (
            setting.samples,
            SamplingParams(temperature=setting.temperature, top_p=setting.top_p, seed=setting.seed + start),
        ),
    ]
    parts: list[list[Group]] = []
    for count, params in draws:
        if count and params:
            params = replace(
                params, max_new_tokens=setting.max_completion_tokens, stop_strings=setting.stop_strings
            )
            parts.append(
                collect(
                    engine,
                    tokenizer,
                    batch,
                    prompt_format,
                    params,
                    count,
                    rewards=rewards,
                    matcher=setting.matcher,
                )
            )
    seconds = sum(part[0].seconds for part in parts)
    return [
        replace(
            groups[0], rollouts=[r for group in groups for r in group.rollouts], seconds=seconds / len(batch)
        )
        for groups in zip(*parts, strict=True)
    ]


def _rows(group: Group, greedy: bool) -> list[dict[str, Any]]:
    rows = rows_of(group)
    for row in rows:
        row["greedy"] = greedy and row["sample"] == 0
        row["seconds"] = group.seconds / len(rows)
        row["rewards"] = {name: value for name, value in row["rewards"].items() if value is not None}
        if row["reward"] is None and not row["rewards"]:
            del row["reward"], row["rewards"]
    return rows
