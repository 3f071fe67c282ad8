"""The one evaluator: during training, after it, and on any model. Greedy, and sampled when asked.

Protocol: one greedy completion per problem; ``samples`` more at the stated temperature. Every completion is parsed by
the prompt format and graded by the same grader as the reward (``correct``), and once more whatever its form: ``lenient`` is
``correct``, or its last number is the gold answer. The samples are plain rows; numbers with intervals come
from ``evaluation.estimators``. With ``progress`` an evaluation that was killed continues with the batches that are missing
and ends with the same samples: each batch draws with a seed of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

from algorist.config.schema import EvalSection
from algorist.evaluation.protocols import REFERENCES, protocol_name
from algorist.evaluation.record import Progress, Pulse
from algorist.grading import is_right_leniently
from algorist.prompts import PromptFormat
from algorist.rewards import RewardSet
from algorist.rollouts.base import RolloutEngine, SamplingParams
from algorist.rollouts.collect import collect
from algorist.store.rows import rows_of
from algorist.types import Group, Problem

T = TypeVar("T")


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
        for key, known in REFERENCES.items():
            here = (prompt_format.name, self.samples, self.max_completion_tokens, self.stop_strings)
            if here == (known.prompt_format, 0, known.max_completion_tokens, known.stop_strings):
                name = f"{key}@{known.version}"
        settings = asdict(self) | {"stop_strings": list(self.stop_strings)}
        if not self.stop_strings:  # as artifacts without them say it
            del settings["stop_strings"]
        switches = (
            {"template_kwargs": dict(prompt_format.template_kwargs)} if prompt_format.template_kwargs else {}
        )
        turns = {"turns": prompt_format.turns.recorded()} if prompt_format.turns else {}
        return {"name": name, **settings, "prompt_format": prompt_format.name, **switches, **turns}


class Peers(Protocol):
    """The processes that evaluate together (``training.processes.Processes``), ``rank`` of ``count``."""

    @property
    def count(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def from_main(self, action: Callable[[], T]) -> T:
        """Return what ``action`` returns in the process of rank 0."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks."""


@dataclass(frozen=True)
class Alone:
    """One process."""

    count: int = 1
    rank: int = 0

    def from_main(self, action: Callable[[], T]) -> T:
        """Return what ``action`` returns."""
        return action()

    def gather(self, value: T) -> list[T]:
        """Return the value."""
        return [value]


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
    peers: Peers = Alone(),
) -> list[dict[str, Any]]:
    """Return one row per completion: the problem, the completion, its parse, its grade and its rewards.

    Several processes take the batches in turns. Each batch draws with a seed of its own, so the rows are those of one process.

    Args:
        engine: Any rollout engine.
        tokenizer: Renders prompts and decodes completions.
        problems: Held-out problems.
        prompt_format: Renders and parses.
        setting: Sampling and grading.
        rewards: The rewards of the recipe; their values go to ``rewards``, the weighted sum to ``reward``.
        progress: Keeps finished batches, and gives those of an evaluation that was killed; the main process's.
        on_progress: Called with (problems done, problems in all) after each batch, and every second.
        greedy: Draw the greedy completion too; without it there are the sampled ones only.
        peers: The processes that evaluate together; each must call this.
    """
    batches = {
        start: problems[start : start + setting.batch_size]
        for start in range(0, len(problems), setting.batch_size)
    }
    known = {start: progress.rows_at(start, batch) for start, batch in batches.items()} if progress else {}
    done = {start: rows for start, rows in known.items() if rows is not None}
    missing = peers.from_main(lambda: [start for start in batches if start not in done])
    with Pulse(on_progress, len(problems)) as pulse:
        for first in range(0, len(missing), peers.count):
            pulse(sum(len(batches[start]) for start in done))
            sampled: dict[int, list[dict[str, Any]]] = {}
            for start in missing[first : first + peers.count][peers.rank : peers.rank + 1]:
                groups = _collect(
                    engine, tokenizer, batches[start], prompt_format, setting, start, greedy, rewards, pulse
                )
                sampled[start] = [row for group in groups for row in _rows(group, greedy)]
            for start, rows in sorted(item for part in peers.gather(sampled) for item in part.items()):
                done[start] = rows
                if progress:
                    progress.add(start, rows)
        pulse(sum(len(batches[start]) for start in done))
    # Only the main process has the batches that were there already.
    return [row for start in batches for row in done.get(start, [])]


def _collect(
    engine: RolloutEngine,
    tokenizer: Any,
    batch: Sequence[Problem],
    prompt_format: PromptFormat,
    setting: EvaluationSetting,
    start: int,
    greedy: bool,
    rewards: RewardSet | None,
    pulse: Pulse,
) -> list[Group]:
    """Return one group for each problem: the greedy completion first, then the sampled ones."""
    limits: dict[str, Any] = {
        "max_new_tokens": setting.max_completion_tokens,
        "stop_strings": setting.stop_strings,
    }
    drawn = SamplingParams(
        temperature=setting.temperature, top_p=setting.top_p, seed=setting.seed + start, **limits
    )
    draws = [(int(greedy), SamplingParams(temperature=0.0, **limits)), (setting.samples, drawn)]
    each = len(batch) / max(1, int(greedy) + setting.samples)
    parts: list[list[Group]] = []
    for count, params in draws:
        if count:
            pulse.sampling(engine, begin=each * int(greedy) * len(parts), size=each * count)
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
    rows, problem = rows_of(group), group.problem.columns()
    for row in rows:
        row["lenient"] = bool(row["correct"]) or is_right_leniently(row["completion"], row["gold"], problem)
        row["greedy"] = greedy and row["sample"] == 0
        row["seconds"] = group.seconds / len(rows)
        row["rewards"] = {name: value for name, value in row["rewards"].items() if value is not None}
        if row["reward"] is None and not row["rewards"]:
            del row["reward"], row["rewards"]
    return rows
