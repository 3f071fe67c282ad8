"""Agreement of what groups are paid with what is right in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from algorist.types import Group

Floats = NDArray[np.float64]


def right_of(group: Group) -> Floats:
    """Return 1 for each right completion of a group, else 0."""
    return np.array([float(bool(r.grade and r.grade.correct)) for r in group.rollouts])


@dataclass
class Agreement:
    """Sums up groups with the advantages (or rewards) of their completions."""

    groups: int = 0
    differing: int = 0
    both: float = 0.0
    of_pay: float = 0.0
    of_right: float = 0.0

    def add(self, group: Group, paid: Sequence[float]) -> None:
        pay, right = np.nan_to_num(np.array(paid)), right_of(group)
        pay, right = pay - pay.mean(), right - right.mean()
        self.groups += 1
        self.differing += bool(np.any(np.abs(pay) > 1e-9))
        self.both += float(pay @ right)
        self.of_pay += float(pay @ pay)
        self.of_right += float(right @ right)

    @property
    def useful(self) -> float:
        """Share of the groups whose completions are paid differently."""
        return self.differing / self.groups if self.groups else 0.0

    @property
    def value(self) -> float:
        """Correlation within groups; 0 where one of the two is constant."""
        size = (self.of_pay * self.of_right) ** 0.5
        return self.both / size if size > 0 else 0.0
