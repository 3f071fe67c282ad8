"""From rewards to advantages: each completion is compared with the others of its group.

An advantage is a function of rewards (P, G), the G completions of a problem in one row, that returns advantages of the same
shape. It may also take by name ``components_PGK``, the single rewards, and ``weights_K``, their weights in the sum. A reward may be NaN ("no verdict"): it is left out of its group's statistics and gets advantage 0. All standard
deviations are unbiased (divisor G - 1), as torch and TRL take them; a group of one has deviation 0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from algorist.errors import ConfigError
from algorist.user_code import load_function
from algorist_grader.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

Advantage = Callable[..., "Tensor"]
F = TypeVar("F", bound=Callable[..., "Tensor"])
ADVANTAGES: Registry[Advantage] = Registry("advantage")


def advantage(name: str) -> Callable[[F], F]:
    """Register ``function(rewards_PG) -> advantages_PG`` as ``grpo.advantage: name``; the function stays as it is."""
    return ADVANTAGES.register(name)


def advantage_named(name: str) -> Advantage:
    """Return the advantage called ``name``, or that of ``file.py:function``.

    Raises:
        ConfigError: Unknown name, a file that cannot be used, or a function that asks for something else.
    """
    if ".py:" not in name:
        return ADVANTAGES.get(name)
    function = load_function(name, "grpo.advantage")
    parameters = list(inspect.signature(function).parameters.values())
    needed = [p.name for p in parameters[1:] if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    single = [p.name for p in parameters if p.name in ("components_PGK", "weights_K")]
    if not parameters or set(needed) - set(single) or len(single) == 1:
        raise ConfigError(
            f"grpo.advantage={name} takes ({', '.join(p.name for p in parameters)}); expected one argument, the rewards (P, G), and "
            "default values for any other; or rewards, components_PGK and weights_K: the single rewards (P, G, K) and their weights"
        )
    return function


def probe_advantage(function: Advantage, group_size: int, weights: Sequence[float]) -> None:
    """Compute an advantage on two made-up groups, one of equal rewards, as ``losses.probe_loss`` does a loss; the single rewards are alike.

    Raises:
        ConfigError: It raises, returns another shape or kind, or what is not finite.
    """
    import torch

    rewards_PG = torch.stack([torch.arange(group_size) / group_size, torch.ones(group_size)])
    named = {}
    if "components_PGK" in inspect.signature(function).parameters:
        single_PGK = torch.stack([rewards_PG] * len(weights), -1)
        named = {"components_PGK": single_PGK, "weights_K": torch.tensor([*weights])}
    checked(function(rewards_PG, **named), rewards_PG, getattr(function, "__name__", "of the recipe"))


def checked(advantages_PG: Tensor, rewards_PG: Tensor, name: str) -> Tensor:
    """Check the advantages that ``name`` made of rewards (P, G); a NaN reward gets 0.

    Raises:
        ConfigError: They are not a tensor of that shape, or not finite where there is a reward.
    """
    shape = tuple(rewards_PG.shape)
    if not hasattr(advantages_PG, "shape") or tuple(advantages_PG.shape) != shape:
        returned = getattr(advantages_PG, "shape", None)
        what = type(advantages_PG).__name__ if returned is None else tuple(returned)
        raise ConfigError(
            f"the advantage '{name}' returned {what} for rewards of shape {shape}; expected a tensor of that shape"
        )
    advantages_PG = advantages_PG.float().masked_fill(rewards_PG.isnan(), 0.0)
    if not bool(advantages_PG.isfinite().all()):
        row = int((~advantages_PG.isfinite()).any(1).nonzero()[0])
        raise ConfigError(
            f"the advantage '{name}' is not finite for the rewards {rewards_PG[row].tolist()}: {advantages_PG[row].tolist()}"
        )
    return advantages_PG


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

    A group of equal rewards gets exact zeros, so that the update leaves it out: in float32 the mean of eight times 1.2 is not 1.2.
    Source: Dr. GRPO (2503.20783) section 3.2.
    """
    centred_PG = rewards_PG - rewards_PG.nanmean(-1, keepdim=True)
    return centred_PG.masked_fill(~useful_groups(rewards_PG)[:, None], 0.0).nan_to_num(nan=0.0)


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


@advantage("maxrl")
def maxrl(rewards_PG: Tensor) -> Tensor:
    """Return (reward - group mean) / group mean: MaxRL, whose steps are the longer the harder a problem is.

    For rewards of at least 0. With rewards 0 and 1 the expected gradient, up to the factor 1, is that of the truncated log-likelihood
    Σ_k pass@k / k, k = 1 … G - 1 (``docs/estimators.md`` checks it). A group without any reward gets zeros.

    Source: MaxRL (2602.02710) section 4, the centred estimator that drops groups without a right completion.
    """
    mean_P1 = rewards_PG.nanmean(-1, keepdim=True)
    centred_PG = group_centered(rewards_PG)
    return (centred_PG / mean_P1.clamp(min=1e-6)).masked_fill(~(mean_P1 > 1e-6), 0.0)


@advantage("reinforce")
def reinforce(rewards_PG: Tensor, components_PGK: Tensor, weights_K: Tensor) -> Tensor:
    """Return 1 for a right completion and -1 for a wrong one: no baseline, so that groups of equal rewards teach too.

    Right means that the reward of the greatest weight, such as ``correct``, is above 1/2; the others do not count. With
    ``grpo.positive_weight=0.1`` this is W-REINFORCE, with 0 it learns from wrong completions only (NSR).

    Source: Zhu et al. 2025 (2506.01347), rewards +1 and -1 in sections 2 and 5.
    """
    verdict_PG = components_PGK[..., int(weights_K.abs().argmax())]
    return ((verdict_PG > 0.5).to(rewards_PG.dtype) * 2 - 1).masked_fill(verdict_PG.isnan(), 0.0)


@advantage("reinforce_plus_plus")
def reinforce_plus_plus(rewards_PG: Tensor, eps: float = 1e-8) -> Tensor:
    """Return (reward - mean of all rewards) / (deviation of all rewards + eps): no baseline per group, so that groups of equal rewards
    teach too.

    Source: REINFORCE++ (2501.03262) eq. 7, the advantage normalised over the global batch; without its KL term, which is in the loss.
    """
    centred_PG = rewards_PG - rewards_PG.nanmean()
    return (centred_PG / (deviation(rewards_PG.reshape(1, -1)) + eps)).nan_to_num(nan=0.0)


@advantage("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(rewards_PG: Tensor, eps: float = 1e-8) -> Tensor:
    """Return rewards centred in their group, then divided by the deviation of all centred rewards.

    Source: REINFORCE++-baseline (2501.03262) section 3.3.
    """
    centred_PG = group_centered(rewards_PG).masked_fill(rewards_PG.isnan(), math.nan)
    return (centred_PG / (deviation(centred_PG.reshape(1, -1)) + eps)).nan_to_num(nan=0.0)


@advantage("per_reward_normalized")
def per_reward_normalized(
    rewards_PG: Tensor, components_PGK: Tensor, weights_K: Tensor, eps: float = 1e-4
) -> Tensor:
    """Return the weighted sum of each reward's own group-normalised advantages, normalised over the batch.

    A reward of small spread is not drowned by one of large spread, and rewards that cancel in the sum still teach. Equal to TRL's
    ``multi_objective_aggregation="normalize_then_sum"``. Source: GDPO (2601.05242) eq. 4 to 6.
    """
    shape = components_PGK.shape
    rows_NG = components_PGK.movedim(-1, 0).reshape(-1, shape[1])
    normal_NG = group_normalized(rows_NG, eps)
    normal_PGK = normal_NG.reshape(shape[2], shape[0], shape[1]).movedim(0, -1)
    total_PG = (normal_PGK * weights_K).sum(-1).masked_fill(rewards_PG.isnan(), math.nan)
    spread = deviation(total_PG.reshape(1, -1)).nan_to_num(nan=0.0)
    normal_PG = ((total_PG - total_PG.nanmean()) / (spread + eps)).nan_to_num(nan=0.0)
    # The batch's mean is 0 but for rounding, which a group without a signal must not learn from.
    return normal_PG.masked_fill((normal_PGK * weights_K == 0).all(-1).all(-1, keepdim=True), 0.0)


def useful_groups(rewards_PG: Tensor, tolerance: float = 1e-6) -> Tensor:
    """Select groups with a signal, (P,) bool: those whose rewards are not all equal.

    DAPO samples until a batch consists of such groups only. Source: DAPO (2503.14476) section 3.2.
    """
    least, most = (rewards_PG.nan_to_num(nan=end) for end in (math.inf, -math.inf))
    return most.amax(-1) - least.amin(-1) > tolerance
