"""The GRPO step on one page: collect → advantages → batch → log-probs → loss. Order on the page is order in time.

For each problem q a group of G completions o_1 … o_G is sampled from the policy π_old and rewarded; the policy π_θ then minimises

    L(θ) = Σ_i Σ_t w_it · [ -min(r_it·A_i, clip(r_it, 1 - ε_low, 1 + ε_high)·A_i) + β·k3(π_θ, π_ref) ]

with the ratio r_it = π_θ(o_it | q, o_i,<t) / π_old(o_it | q, o_i,<t), the advantage A_i = (R_i - mean R) / (std R + 1e-4) over the
group, and weights w_it that average over tokens. Loss, weights and advantage are functions of ``objectives`` that a recipe chooses
by name, or a user's own (``grpo.loss``, ``grpo.advantage``).

Source: GRPO (2402.03300) eq. 3 and 4.1.2; DAPO (2503.14476) eq. 8 for the weights; Dr. GRPO (2503.20783).

What differs from the paper, on purpose:

1. β is 0 by default: no reference model, no penalty (as DAPO, Dr. GRPO and TRL since 0.16). With β the penalty is r_it·k3, whose
   gradient is that of the true KL (DeepSeek-V3.2, 2512.02556).
2. w_it is 1 / the number of completion tokens of the whole step (``dapo``), not 1 / (G·|o_i|): long completions are not damped.
   A rollout batch that feeds several steps counts its tokens once, divided by these steps, as TRL does.
3. Rollouts that feed one step only take r_it = π_θ / stop_gradient(π_θ): exactly 1, with the gradient of REINFORCE, no extra pass.
   Otherwise log π_old is the sampler's where that is exact (float32 on both sides), else one pass of the trainer.
4. A completion whose advantage is 0 is not computed where it would add exactly 0 to loss and gradient. It still counts in w_it.
5. A step is computed in parts of bounded size, one backward each. The weights are fixed before, so the parts add up exactly.
6. With ``grpo.resample`` groups of equal rewards are replaced before the step (``refill.py``): L is then the mean over useful groups.
7. ``grpo.entropy_bonus`` subtracts c·H(π_θ(· | q, o_i,<t)) from the loss of each token, with the gradient of the whole distribution.
8. A sampler that differs from the trainer (vLLM, another type) is corrected by a truncated ratio per token or sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from algorist.errors import ConfigError
from algorist.objectives import Loss, sampler_weights, token_losses, token_weights
from algorist.objectives.advantages import Advantage, checked
from algorist.objectives.ratios import Correction
from algorist.training.batch import Batch
from algorist.training.group_rewards import components_of, rewards_of
from algorist.training.metrics import Metrics
from algorist.types import Group


@dataclass(frozen=True)
class Objective:
    """What a step minimises.

    Attributes:
        loss: A registered or own loss; ``parameters`` are its settings (``clip_low``, …).
        advantage: Turns rewards (P, G) into advantages (P, G).
        reward_weights: Each reward's weight in the sum, for advantages of single rewards.
        beta: Weight of the KL penalty.
        entropy_bonus: Weight of the entropy, which is subtracted from the loss of each token.
        top_entropy_share: Share of the step's tokens, those of highest entropy, that the loss counts.
        longest: The longest possible completion in tokens, for ``seq-mean-token-sum-norm``.
        mask_truncated: Completions that the length limit ended do not count.
        correction: Mode, least and greatest weight of the correction for the sampler; None for none.
        skip: Leave out completions of advantage 0 where that is exact.
    """

    loss: Loss
    advantage: Advantage
    parameters: Mapping[str, Any] = field(default_factory=dict)
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    beta: float = 0.0
    entropy_bonus: float = 0.0
    top_entropy_share: float = 1.0
    longest: int = 256
    mask_truncated: bool = False
    correction: tuple[Correction, float | None, float | None] | None = None
    skip: bool = True


# 1. collect: ``rollouts.collect`` samples, parses, grades and rewards; the trainer calls it with the policy's engine.


# 2. advantages
def single_rewards(objective: Objective) -> Mapping[str, float] | None:
    """Return the weights of the single rewards where the advantage asks for these, else None."""
    wanted = inspect.signature(objective.advantage).parameters
    return objective.reward_weights if "components_PGK" in wanted else None


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


# 3. batch
def deal(rows: int, steps: int) -> list[list[int]]:
    """Return which completions each of ``steps`` optimizer steps takes, in which order: equal shares, drawn as TRL draws them."""
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
        return torch.cat([token_weights(part, reduction) / len(parts) for part in parts])
    denominator = objective.longest if reduction == "seq-mean-token-sum-norm" else max(tokens, 1e-9)
    return token_weights(batch.mask, reduction, denominator=denominator)


def rows_to_compute(batch: Batch, objective: Objective) -> list[int]:
    """Return the completions that need a forward pass, completions of a prompt together; always at least one."""
    counts = batch.mask.any(1)
    if (
        objective.skip
        and objective.loss.zero_advantage_adds_nothing
        and not (objective.beta or objective.entropy_bonus)
    ):
        counts = counts & (batch.advantages != 0)
    rows = counts.nonzero()[:, 0].tolist()
    if not rows:  # every parameter needs a gradient, and every process takes part in its reduction
        rows = [min(range(len(batch)), key=lambda row: len(batch.completions[row]))]
    return batch.in_group_order(rows)


# 4. log-probs: ``LogProbs`` packs the batch and runs the policy.


# 5. loss
def sampler_correction(batch: Batch, objective: Objective) -> Tensor | None:
    """Return the weights (B, T) or (B, 1) that correct for the sampler, or None where nothing is corrected."""
    if objective.correction is None or batch.sampler_log_probs is None or batch.old_log_probs is None:
        return None
    mode, low, high = objective.correction
    return sampler_weights(batch.old_log_probs, batch.sampler_log_probs, batch.mask, mode, low=low, high=high)


def loss_of(
    log_probs: Tensor,
    entropy: Tensor | None,
    batch: Batch,
    weights: Tensor,
    objective: Objective,
    metrics: Metrics,
) -> Tensor:
    """Return the share of the step's loss that the completions of ``batch`` have, and count their metrics.

    Args:
        log_probs: (B, T) under the policy, with gradient.
        entropy: (B, T) of its next-token distributions, for the log and the bonus; or None.
        batch: A part of the step.
        weights: (B, T) of ``step_weights``.
        objective: What is minimised.
        metrics: Takes sums over tokens and completions.
    """
    per_token, values = token_losses(
        log_probs,
        batch.advantages,
        batch.mask,
        loss=objective.loss,
        old_log_probs=batch.old_log_probs,
        ref_log_probs=batch.ref_log_probs,
        beta=objective.beta,
        unbiased_kl=True,
        sampler_weights=sampler_correction(batch, objective),
        **objective.parameters,
    )
    for name, value in values.items():
        metrics.add(name, value, batch.mask)
    if not per_token.requires_grad:
        raise ConfigError(
            f"the loss '{objective.loss.name}' does not depend on log_probs, so nothing can be learned from it"
        )
    if entropy is not None:
        metrics.add("entropy", entropy.detach(), batch.mask)
        if objective.entropy_bonus:
            per_token = per_token - objective.entropy_bonus * entropy.masked_fill(~batch.mask, 0.0)
    return (per_token * weights).sum()
