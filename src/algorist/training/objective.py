"""Objective of a step: advantages of groups, weights of tokens, the loss of a micro-batch. ``step.py`` has the order."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from algorist.objectives import Objective, token_losses, token_weights, useful_groups
from algorist.objectives.advantages import checked
from algorist.training.batch import Batch
from algorist.training.extension import Extensions
from algorist.training.metrics import Metrics
from algorist.types import Group

if TYPE_CHECKING:
    from algorist.training.lm_head import OfHead


def single_rewards(objective: Objective) -> Mapping[str, float] | None:
    """Return the weights of the single rewards where the advantage asks for these, else None."""
    parameters = inspect.signature(objective.advantage).parameters
    return objective.reward_weights if "components_PGK" in parameters else None


def advantages_of(groups: Sequence[Group], objective: Objective) -> Tensor:
    """Return the advantage (P, G) of every completion of P groups of one size; 0 where no reward applies."""
    rewards_PG = rewards_of(groups)
    named: dict[str, Tensor] = {}
    if (weights := single_rewards(objective)) is not None:
        named = {
            "components_PGK": components_of(groups, weights),
            "weights_K": torch.tensor([*weights.values()]),
        }
    advantages_PG = objective.advantage(rewards_PG, **named)
    return checked(advantages_PG, rewards_PG, getattr(objective.advantage, "__name__", "of the recipe"))


def deal(rows: int, steps: int) -> list[list[int]]:
    """Deal completions to ``steps`` optimizer steps: equal shares in random order, drawn as TRL draws them."""
    order = torch.randperm(rows).tolist()
    size = rows // steps
    return [order[start : start + size] for start in range(0, size * steps, size)]


def step_weights(batch: Batch, objective: Objective, *, tokens: float, micro_batch: int) -> Tensor:
    """Return the weights (B, T) of one optimizer step's tokens on this process.

    Args:
        batch: The step's completions, in the order in which they were dealt.
        objective: Its loss knows the reduction.
        tokens: Denominator of ``token-mean``.
        micro_batch: Completions of a micro-batch, for ``micro-batch-token-mean``.
    """
    reduction = objective.loss.reduction
    if reduction == "micro-batch-token-mean":
        parts = batch.mask.split(micro_batch)
        weights = torch.cat([token_weights(part, reduction) / len(parts) for part in parts])
    else:
        denominator: Any = objective.longest if reduction == "seq-mean-token-sum-norm" else max(tokens, 1e-9)
        if reduction == "prompt-mean-token-mean":
            denominator = batch.mean_lengths
        weights = token_weights(batch.mask, reduction, denominator=denominator)
    return weights if batch.counted is None else weights * batch.counted


def rows_to_compute(batch: Batch, objective: Objective, extensions: Extensions) -> list[int]:
    """Return the completions that need a forward pass, completions of a prompt together; always at least one."""
    counts = batch.mask if batch.counted is None else batch.mask & (batch.counted != 0)
    if (
        objective.skip
        and objective.loss.zero_advantage_adds_nothing
        and not (objective.entropy_bonus or any(e.needs_every_row for e in extensions))
    ):
        counts = counts & (batch.advantages != 0)
    rows = counts.any(1).nonzero()[:, 0].tolist()
    if not rows:  # every parameter needs a gradient, and every process takes part in its reduction
        rows = [min(range(len(batch)), key=lambda row: len(batch.completions[row]))]
    return batch.in_group_order(rows)


def of_heads(extensions: Extensions, batch: Batch) -> dict[str, OfHead]:
    """Return by name what extensions compute where the policy's head has its states."""
    return {e.name: compute for e in extensions if (compute := e.of_head(batch)) is not None}


@dataclass
class LossInputs:
    """Inputs of the loss for one micro-batch.

    Attributes:
        log_probs: (B, T) under the policy, with gradient.
        entropy: (B, T) of its next-token distributions, for the log and the bonus; or None.
        batch: Its completions, advantages and further numbers per token.
        weights: (B, T) of ``step_weights``.
        metrics: Takes sums over its tokens and completions.
        inside: (B, T) log-probs, 0 outside the mask; extensions compute with these.
        factors: Of the policy's loss, per token or completion, (B, T) or (B, 1) without gradient.
        terms: Added to the loss per token, (B, T).
    """

    log_probs: Tensor
    entropy: Tensor | None
    batch: Batch
    weights: Tensor
    metrics: Metrics
    inside: Tensor = field(init=False)
    factors: list[Tensor] = field(default_factory=list)
    terms: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inside = self.log_probs.masked_fill(~self.batch.mask, 0.0)


def loss_of(inputs: LossInputs, objective: Objective, extensions: Extensions) -> Tensor:
    """Return the share of the step's loss that a part of it has."""
    log_probs, batch, metrics = inputs.log_probs, inputs.batch, inputs.metrics
    for extension in extensions:
        extension.loss(inputs)
    policy_weights = batch.policy_weights
    for factor in inputs.factors:
        policy_weights = factor if policy_weights is None else policy_weights * factor
    per_token, values = token_losses(
        log_probs,
        batch.advantages,
        batch.mask,
        loss=objective.loss,
        old_log_probs=batch.old_log_probs,
        sampler_weights=policy_weights,
    )
    for name, value in values.items():
        metrics.add(name, value, batch.mask)
    for term in inputs.terms:
        per_token = per_token + term.masked_fill(~batch.mask, 0.0)
    if (entropy := inputs.entropy) is not None:
        metrics.add("entropy", entropy.detach(), batch.mask)
        if bonus := objective.entropy_bonus + sum(e.entropy_bonus for e in extensions):
            per_token = per_token - bonus * entropy.masked_fill(~batch.mask, 0.0)
    loss = (per_token * inputs.weights).sum()
    # An infinite loss may have a gradient of zeros: NaN, so that the step is left out and counted like any other of its kind.
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


# ---- the rewards of groups as tensors, and which groups carry a signal


def rewards_of(groups: Sequence[Group]) -> Tensor:
    """Return the rewards (P, G) of P groups of one size; NaN where none applies."""
    return torch.tensor([[math.nan if r.reward is None else r.reward for r in g.rollouts] for g in groups])


def components_of(groups: Sequence[Group], weights: Mapping[str, float]) -> Tensor:
    """Return the single rewards (P, G, K) in the order of ``weights``; NaN where one does not apply, or the rollout has no reward."""
    rows = [[[r.rewards.get(name) for name in weights] for r in group.rollouts] for group in groups]
    values = torch.tensor([[[math.nan if v is None else v for v in row] for row in group] for group in rows])
    return values.masked_fill(rewards_of(groups).isnan()[..., None], math.nan)


def useful(groups: Sequence[Group], weights: Mapping[str, float] | None = None) -> list[bool]:
    """Mark groups that carry a signal: their rewards differ, or with ``weights`` a single reward whose weight is not 0."""
    if not groups:
        return []
    carries_P = useful_groups(rewards_of(groups))
    if weights is not None:
        counted = {name: weight for name, weight in weights.items() if weight}
        for component_PG in components_of(groups, counted).unbind(-1):
            carries_P |= useful_groups(component_PG)
    return carries_P.tolist()  # type: ignore[no-any-return]
