"""Online pools: solved problems rest, hopeless ones come back rarely; whatever comes back is judged anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from algorist.config.section import Section
from algorist.training.extension import Control, Event, Extension, Sampled, SamplingTrainer, extension
from algorist.types import Group


class PoolsSection(Section):
    """Rollout batches that a problem rests; each time in a row it rests twice as long."""

    solved: int = Field(16, ge=0)
    """Rollout batches that a problem rests after a group that was all right; twice as many each time in a row."""
    hopeless: int = Field(8, ge=0)
    """The same after a group that was all wrong."""


class _Keys(Section):
    pools: PoolsSection | None = None
    """Let problems that are solved, or hopeless, rest for some rollout batches; left out, none rests."""


@extension
class Pools(Extension):
    """Resting problems, and the rollout batches at which they return.

    A problem rests after a group in which every completion was right, or none; each time in a row twice as long.
    """

    name, keys, order = "pools", {"grpo": _Keys}, 10

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self.section, self.number = recipe.grpo.pools, 0
        self._rests: dict[
            str, tuple[str, int, int]
        ] = {}  # id → pool, times in a row, first batch after the rest

    def resting(self) -> set[str]:
        """Return the ids of the problems that rest now."""
        return {name for name, (_, _, until) in self._rests.items() if until > self.number}

    def problems(self, sampled: Sampled, sampler: SamplingTrainer) -> None:
        """Take other problems for those that rest, as far as there are others."""
        problems, resting = sampled.problems, self.resting()
        sampler.resting = resting
        awake = [p for p in problems if p.id not in resting]
        fresh = sampler.draw(len(problems) - len(awake), {p.id for p in awake})
        asleep = [p for p in problems if p.id in resting]
        sampled.problems = [*awake, *fresh, *asleep][: len(problems)]

    def seen(self, event: Event) -> Control | None:
        return Control(metrics=self.judge(event.groups)) if event.kind == "sampled" else None

    def judge(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Take all groups of a rollout batch; groups without a verdict change nothing."""
        self.number += 1
        for group in groups:
            right = [r.grade.correct for r in group.rollouts if r.grade is not None]
            pool = "solved" if right and all(right) else "hopeless" if right and not any(right) else ""
            before, times, _ = self._rests.pop(group.problem.id, ("", 0, 0))
            if pool:
                times = times + 1 if pool == before else 1
                length = getattr(self.section, pool) * 2 ** min(times - 1, 16)
                self._rests[group.problem.id] = (pool, times, self.number + length)
        return {"groups/resting": float(len(self.resting()))}

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.number, "rests": self._rests}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self._rests = (
            state["batch"],
            {name: tuple(rest) for name, rest in state["rests"].items()},
        )
