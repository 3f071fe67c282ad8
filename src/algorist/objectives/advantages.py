"""From rewards to advantages: each completion is compared with the others of its group.

An advantage is a function of rewards (P, G), the G completions of a problem in one row, that returns advantages of the same
shape. A reward may be NaN ("no verdict"): it is left out of its group's statistics and gets advantage 0. All standard
deviations are unbiased (divisor G - 1), as torch and TRL take them; a group of one has deviation 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from algorist.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

Advantage = Callable[["Tensor"], "Tensor"]
F = TypeVar("F", bound=Callable[..., "Tensor"])
ADVANTAGES: Registry[Advantage] = Registry("advantage")


def advantage(name: str) -> Callable[[F], F]:
    """Register ``function(rewards_PG) -> advantages_PG`` as ``grpo.advantage: name``; the function stays as it is."""
    return ADVANTAGES.register(name)


def deviation(rewards_PG: Tensor) -> Tensor:
    """Return the unbiased standard deviation of each row, NaN left out, (P, 1); 0 for fewer than two values."""
    if rewards_PG.dim() != 2:
        raise ValueError(
            f"rewards have shape {tuple(rewards_PG.shape)}; expected (problems, completions of each problem)"
        )
    count = (~rewards_PG.isnan()).sum(-1, keepdim=True)
    squares = (rewards_PG - rewards_PG.nanmean(-1, keepdim=True)).square().nansum(-1, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


@advantage("group_centered")
def group_centered(rewards_PG: Tensor) -> Tensor:
    """Return reward minus group mean: Dr. GRPO's advantages, without the bias of dividing by the deviation.

    Source: Dr. GRPO (2503.20783) section 3.2.
    """
    return (rewards_PG - rewards_PG.nanmean(-1, keepdim=True)).nan_to_num(nan=0.0)


@advantage("group_normalized")
def group_normalized(rewards_PG: Tensor, eps: float = 1e-4) -> Tensor:
    """Return (reward - group mean) / (group deviation + eps): GRPO's advantages.

    ``eps`` is 1e-4 in TRL and 1e-6 in CS336. A group of equal rewards gets zeros. Source: GRPO (2402.03300) 4.1.2.
    """
    return group_centered(rewards_PG) / (deviation(rewards_PG).nan_to_num(nan=0.0) + eps)


@advantage("batch_normalized")
def batch_normalized(rewards_PG: Tensor, eps: float = 1e-4) -> Tensor:
    """Return (reward - group mean) / (deviation of all rewards + eps), TRL's ``scale_rewards="batch"``."""
    return group_centered(rewards_PG) / (deviation(rewards_PG.reshape(1, -1)) + eps)


@advantage("leave_one_out")
def leave_one_out(rewards_PG: Tensor) -> Tensor:
    """Return reward minus the mean of the others of its group: RLOO, an unbiased baseline.

    Equal to G / (G - 1) times ``group_centered``; a group of one gets 0. Source: RLOO (2402.14740) eq. 7.
    """
    count = (~rewards_PG.isnan()).sum(-1, keepdim=True)
    return group_centered(rewards_PG) * count / (count - 1).clamp(min=1)


def useful_groups(rewards_PG: Tensor, tolerance: float = 1e-6) -> Tensor:
    """Return which groups teach something, (P,) bool: those whose rewards are not all equal.

    DAPO samples until a batch consists of such groups only. Source: DAPO (2503.14476) section 3.2.
    """
    return deviation(rewards_PG).squeeze(-1).nan_to_num(nan=0.0) > tolerance
