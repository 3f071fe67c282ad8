"""Online pools: solved problems rest, hopeless ones come back rarely; whatever comes back is judged anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from algorist.config.grpo_sections import PoolsSection
from algorist.types import Group


class Pools:
    """Which problems rest, and until which rollout batch.

    A problem rests after a group in which every completion was right, or none; each time in a row twice as long.

    Args:
        section: How many rollout batches a first rest lasts.
    """

    def __init__(self, section: PoolsSection) -> None:
        self.section, self.batch = section, 0
        self._rests: dict[
            str, tuple[str, int, int]
        ] = {}  # id → pool, times in a row, first batch after the rest

    def resting(self) -> set[str]:
        """Return the ids of the problems that rest now."""
        return {name for name, (_, _, until) in self._rests.items() if until > self.batch}

    def see(self, groups: Sequence[Group]) -> None:
        """Take all groups of a rollout batch; groups without a verdict change nothing."""
        self.batch += 1
        for group in groups:
            right = [r.grade.correct for r in group.rollouts if r.grade is not None]
            pool = "solved" if right and all(right) else "hopeless" if right and not any(right) else ""
            before, times, _ = self._rests.pop(group.problem.id, ("", 0, 0))
            if pool:
                times = times + 1 if pool == before else 1
                length = getattr(self.section, pool) * 2 ** min(times - 1, 16)
                self._rests[group.problem.id] = (pool, times, self.batch + length)

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch, "rests": self._rests}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch, self._rests = state["batch"], {name: tuple(rest) for name, rest in state["rests"].items()}
