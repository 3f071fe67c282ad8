"""The rewards of groups as tensors, and which groups carry a signal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from algorist.objectives import useful_groups
from algorist.types import Group


def rewards_of(groups: Sequence[Group]) -> Tensor:
    """Return the rewards (P, G) of P groups of one size; NaN where none applies."""
    return torch.tensor(
        [[math.nan if r.reward is None else r.reward for r in group.rollouts] for group in groups]
    )


def components_of(groups: Sequence[Group], weights: Mapping[str, float]) -> Tensor:
    """Return the single rewards (P, G, K) in the order of ``weights``; NaN where one does not apply."""
    rows = [[[r.rewards.get(name) for name in weights] for r in group.rollouts] for group in groups]
    return torch.tensor([[[math.nan if v is None else v for v in row] for row in group] for group in rows])


def useful(groups: Sequence[Group], weights: Mapping[str, float] | None = None) -> list[bool]:
    """Return which groups carry a signal: their rewards differ, or with ``weights`` a single reward whose weight is not 0."""
    if not groups:
        return []
    carries_P = useful_groups(rewards_of(groups))
    if weights is not None:
        counted = {name: weight for name, weight in weights.items() if weight}
        for component_PG in components_of(groups, counted).unbind(-1):
            carries_P |= useful_groups(component_PG)
    return carries_P.tolist()  # type: ignore[no-any-return]
