"""Replay: places without a useful group are filled with useful groups of earlier rollout batches, corrected for their age.

A replayed completion keeps the log-probs of the policy that sampled it as its old log-probs, so the ratio of the loss is the importance
weight π_θ / π_old, clipped or capped as the loss does it; nothing older than ``max_age`` rollout batches is used, and no group twice.

Source: experience replay with truncated importance weights, ACER (1611.01224); for GRPO, RePO (2506.09340).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from algorist.config.section import Section
from algorist.training.extension import Extension, PolicyTrainer, Sampled, SamplingTrainer, extension
from algorist.types import Group


class ReplaySection(Section):
    """Replay of useful groups, corrected by the ratio to the policy that sampled them."""

    max_age: int = Field(4, ge=1)
    """Rollout batches after which a group is no longer used; each is replayed once at most."""


class _Keys(Section):
    replay: ReplaySection | None = None
    """Put useful groups of earlier rollout batches in the place of groups without a signal."""


@extension
class Replay(Extension):
    """The useful groups of the last rollout batches; those of a checkpoint are looked up by their problems' ids."""

    name, keys, order = "replay", {"grpo": _Keys}, 30

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self.max_age, self.number = recipe.grpo.replay.max_age, 0
        self._groups: list[tuple[int, Group]] = []  # rollout batch, group

    def prepare(self, model: Any, trainer: PolicyTrainer) -> None:
        self._problems = {problem.id: problem for problem in trainer.problems}

    def groups(self, sampled: Sampled, sampler: SamplingTrainer) -> None:
        sampled.earlier += self.fill(sampled, sampler.useful(sampled.groups), sampler.useful(sampled.spare))

    def fill(self, sampled: Sampled, useful: Sequence[bool], spare_useful: Sequence[bool]) -> list[int]:
        """Put earlier groups in the places of useless ones, the newest first; return these places.

        The useful fresh groups are kept for later batches, those that were sampled beyond need included.

        Args:
            sampled: The rollout batch; its useless groups that are replaced go to ``spare``.
            useful: Which of ``sampled.groups`` carry a signal.
            spare_useful: The same of ``sampled.spare``.
        """
        present = {group.problem.id for group in sampled.groups}
        new = [g for g, good in zip(sampled.spare, spare_useful, strict=True) if good]
        new += [g for g, good in zip(sampled.groups, useful, strict=True) if good]
        places = []
        for place in [place for place, good in enumerate(useful) if not good]:
            entry = next((e for e in reversed(self._groups) if e[1].problem.id not in present), None)
            if entry is None:
                break
            self._groups.remove(entry)
            present.add(entry[1].problem.id)
            sampled.spare.append(sampled.groups[place])
            sampled.groups[place] = entry[1]
            places.append(place)
        self.number += 1
        known = [
            (self.number, g) for g in new if all(r.log_probs and None not in r.log_probs for r in g.rollouts)
        ]
        oldest = self.number + 1 - self.max_age
        self._groups = [e for e in [*self._groups, *known] if e[0] >= oldest]
        return places

    def state_dict(self) -> dict[str, Any]:
        groups = [(batch, group.problem.id, group.to_dict()) for batch, group in self._groups]
        return {"batch": self.number, "groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["batch"]
        self._groups = [
            (batch, Group.from_dict(self._problems[name], values)) for batch, name, values in state["groups"]
        ]
