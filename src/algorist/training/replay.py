"""Replay: places without a useful group are filled with useful groups of earlier rollout batches, corrected for their age.

A replayed completion keeps the log-probs of the policy that sampled it as its old log-probs, so the ratio of the loss is the importance
weight π_θ / π_old, clipped or capped as the loss does it; nothing older than ``max_age`` rollout batches is used, and no group twice.

Source: experience replay with truncated importance weights, ACER (1611.01224); for GRPO, RePO (2506.09340).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from algorist.config.grpo_sections import ReplaySection
from algorist.training.refill import Filled
from algorist.types import Grade, Group, Parsed, Problem, Rollout


class Replay:
    """The useful groups of the last rollout batches; a checkpoint's are found again by their problems' ids."""

    def __init__(self, section: ReplaySection, problems: Sequence[Problem]) -> None:
        self.section, self.batch = section, 0
        self._problems = {problem.id: problem for problem in problems}
        self._groups: list[tuple[int, Group]] = []  # rollout batch, group

    def fill(self, filled: Filled, useful: Sequence[bool], spare_useful: Sequence[bool]) -> list[int]:
        """Put earlier groups in the places of useless ones, the newest first; return these places.

        The useful fresh groups are kept for later batches, those that were sampled beyond need included.

        Args:
            filled: The rollout batch; its useless groups that are replaced go to ``spare``.
            useful: Which of ``filled.groups`` carry a signal.
            spare_useful: The same of ``filled.spare``.
        """
        present = {group.problem.id for group in filled.groups}
        new = [g for g, good in zip(filled.spare, spare_useful, strict=True) if good]
        new += [g for g, good in zip(filled.groups, useful, strict=True) if good]
        places = []
        for place in [place for place, good in enumerate(useful) if not good]:
            found = next((e for e in reversed(self._groups) if e[1].problem.id not in present), None)
            if found is None:
                break
            self._groups.remove(found)
            present.add(found[1].problem.id)
            filled.spare.append(filled.groups[place])
            filled.groups[place] = found[1]
            places.append(place)
        self.batch += 1
        known = [
            (self.batch, g) for g in new if all(r.log_probs and None not in r.log_probs for r in g.rollouts)
        ]
        oldest = self.batch + 1 - self.section.max_age
        self._groups = [e for e in [*self._groups, *known] if e[0] >= oldest]
        return places

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: numbers, texts and lists."""
        groups = [
            (batch, group.problem.id, group.prompt, group.prompt_ids, [asdict(r) for r in group.rollouts])
            for batch, group in self._groups
        ]
        return {"batch": self.batch, "groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch = state["batch"]
        self._groups = [
            (batch, Group(self._problems[problem], prompt, ids, [_rollout(r) for r in rollouts]))
            for batch, problem, prompt, ids, rollouts in state["groups"]
        ]


def _rollout(plain: dict[str, Any]) -> Rollout:
    grade = Grade(**plain["grade"]) if plain["grade"] is not None else None
    parsed = Parsed(**plain["parsed"] | {"flags": tuple(plain["parsed"]["flags"])})
    return Rollout(**plain | {"grade": grade, "parsed": parsed})
