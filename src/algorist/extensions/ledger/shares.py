"""Shares of rewards and of tokens in the advantages of a rollout batch, as sums that add up over processes.

With A_i the mean advantage of completion i over the tokens that count, R_i its reward, r_ik the value of reward k and w_k its weight, and
x̃ a number minus its mean over the group:

    share of reward k          Σ_i A_i·w_k·r̃_ik / Σ_i A_i·R̃_i                    adds up to 1 over k, whatever the advantage is
    agreement of x and correct Σ_i x̃_i·c̃_i / √(Σ_i x̃_i²·Σ_i c̃_i²)               x: the advantage, or the reward; c_i: 1 where right
    mass on tokens S           Σ_{it ∈ S} |A_it| / Σ_it |A_it|

Completions in groups of one are compared with the others of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from algorist.diagnosis.signals import UNREADABLE
from algorist.types import Group, Rollout

LEAST = 1e-12
"""Sums below it are 0 but for rounding."""
FOLLOWS = 0.05
"""Agreement of advantages and rewards below which these did not make them, so that shares say nothing."""


def centred(values_PG: Tensor, known_PG: Tensor) -> Tensor:
    """Subtract the mean of the group, or of the batch from groups of one; 0 where a value is not known."""
    values_PG = values_PG.double().masked_fill(~known_PG, 0.0)
    dims = (0, 1) if values_PG.shape[1] == 1 else (1,)
    counts = known_PG.sum(dims, keepdim=True).clamp(min=1)
    return (values_PG - values_PG.sum(dims, keepdim=True) / counts).masked_fill(~known_PG, 0.0)


def agreement(one: Tensor, other: Tensor) -> float | None:
    """Return the correlation of centred numbers; None where one of them does not vary."""
    sizes = one.square().sum() * other.square().sum()
    return float((one * other).sum() / sizes.sqrt()) if float(sizes) > LEAST**2 else None


def reward_sums(
    groups: Sequence[Group], weights: Mapping[str, float], advantages_PG: Tensor
) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Return the sums (above, below) of each reward's share, and how the advantages and the rewards agree with correctness.

    Args:
        groups: P groups of one size G.
        weights: Name of each reward → its weight.
        advantages_PG: Mean advantage of each completion; NaN where no token counts.
    """

    def numbers(value: Any) -> Tensor:
        rows = [[value(rollout) for rollout in group.rollouts] for group in groups]
        return torch.tensor(
            [[float("nan") if v is None else float(v) for v in row] for row in rows], dtype=torch.float64
        )

    rewards_PG = numbers(lambda r: r.reward)
    right_PG = numbers(lambda r: None if r.grade is None else r.grade.correct)
    counts_PG = ~(advantages_PG.isnan() | rewards_PG.isnan())
    advantages_PG = advantages_PG.double().masked_fill(~counts_PG, 0.0)
    whole_PG = centred(rewards_PG, counts_PG)
    below = float((advantages_PG * whole_PG).sum())
    follows = agreement(centred(advantages_PG, counts_PG), whole_PG)
    shares = {}
    if follows is not None and abs(follows) > FOLLOWS:
        for name, weight in weights.items():
            part_PG = centred(weight * numbers(lambda r, n=name: r.rewards.get(n) or 0.0), counts_PG)
            shares[name] = float((advantages_PG * part_PG).sum()), below
    graded_PG = counts_PG & ~right_PG.isnan()
    correct_PG = centred(right_PG, graded_PG)
    pairs = {"advantage": advantages_PG, "reward": rewards_PG}
    agree = {name: agreement(centred(x, graded_PG), correct_PG) for name, x in pairs.items()}
    return shares, {name: value for name, value in agree.items() if value is not None}


def centred_correctness(groups: Sequence[Group]) -> Tensor:
    """Return (B,): 1 or 0 for right and wrong, minus the mean of the group; 0 where there is no verdict."""
    known = torch.tensor([[r.grade is not None for r in group.rollouts] for group in groups])
    right = torch.tensor([[bool(r.grade and r.grade.correct) for r in group.rollouts] for group in groups])
    return centred(right, known).flatten().float()


def mean_advantages(advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean advantage (B,) of each completion over its tokens that count; NaN where none does."""
    inside = advantages_BT.double().masked_fill(~mask_BT, 0.0)
    return inside.sum(1) / mask_BT.sum(1)


def token_sums(
    rollouts: Sequence[Rollout], advantages_BT: Tensor, mask_BT: Tensor
) -> dict[str, tuple[float, float]]:
    """Return by name the advantages' mass on some tokens and on all of them, and the tokens that count; nothing where all advantages are 0."""
    mass_BT = advantages_BT.double().abs().masked_fill(~mask_BT, 0.0)
    of_row, places = mass_BT.sum(1).tolist(), mask_BT.cumsum(1)
    whole = sum(of_row)
    if whole < LEAST:
        return {}
    ends = {"first": places == 1, "last": places == places[:, -1:]}
    sums = {name: float(mass_BT[at & mask_BT].sum()) for name, at in ends.items()}
    for name, fits in _KINDS.items():
        sums[name] = sum(mass for mass, rollout in zip(of_row, rollouts, strict=True) if fits(rollout))
    if any(rollout.turns for rollout in rollouts):
        sums["before_reply"] = sum(float(mass_BT[i, : _end(r)].sum()) for i, r in enumerate(rollouts))
    sampled = sum(sum(rollout.sampled_mask) for rollout in rollouts)
    return {name: (value, whole) for name, value in sums.items()} | {
        "counted": (float(mask_BT.sum()), sampled)
    }


_KINDS = {
    "truncated": lambda r: r.truncated,
    "unread": lambda r: r.grade is not None and r.grade.reason in UNREADABLE,
}


def _end(rollout: Rollout) -> int:
    """Return the place of the last token that the policy did not sample; what comes before it asked for a reply."""
    return max((i for i, sampled in enumerate(rollout.sampled_mask) if not sampled), default=0)
