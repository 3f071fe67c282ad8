"""Weights of completions and tokens: a function each, whose keys are in ``grpo``.

``update_share``, ``positive_weight``, ``drop_equal_groups`` and ``sampler_correction`` weigh a rollout batch once, ``top_entropy_share`` the tokens of each
step, ``off_policy_mask`` the completions of each part of it; ``entropy_control`` moves the entropy bonus after each step.

Why ``sequence_mask`` is the default of ``sampler_correction``, as it is TRL's. The policy gradient of a completion asks for the ratio of
the whole sequence. A ratio per token leaves out what came before the token: its gradient is biased by how far the two policies differ over
the prefix, which grows with the length. The ratio of a sequence is right in expectation and large now and then; truncating it keeps the
outlier with a wrong weight, masking leaves it out, and ``sampling/masked_share`` says how many were. Where both programs compute in the
same type and differ by rounding alone, ratios are near 1 and all four modes agree. ``token_truncate`` (the first one proposed, by F. Yao
and others) uses every token and varies least: take it when the masked share is a tenth or more and cannot be brought down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from algorist.config.section import Section
from algorist.rollouts.engines import ENGINES, is_exact
from algorist.training.extension import Control, Event, Extension, PolicyTrainer, extension

if TYPE_CHECKING:
    from torch import Tensor

    from algorist.training.batch import Batch
    from algorist.training.objective import LossInputs


class EntropySection(Section):
    """A target for the mean entropy of the next-token distributions, and how fast the bonus follows it."""

    target: float = Field(0.2, gt=0)
    """Entropy in nats per token that the policy should not fall below; take it from the ``entropy`` of the first steps."""
    step: float = Field(0.005, gt=0)
    """Change of the coefficient after each optimizer step."""
    start: float = Field(0.0, ge=0)
    """Coefficient before the first step."""
    most: float = Field(1.0, gt=0)
    """Greatest coefficient."""


class CorrectionSection(Section):
    """Weigh the loss by how far the sampler's log-probs are from the trainer's, where the engine is not exact."""

    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "sequence_mask"
    """Correct per token or per sequence; ratios out of bounds are truncated, or their tokens masked."""
    low: float | None = Field(None, ge=0, le=1)
    """Lower bound of the ratio; none when left out."""
    high: float | None = Field(3.0, ge=1)
    """Upper bound of the ratio."""


class _Keys(Section):
    drop_equal_groups: bool = False
    """Leave groups whose advantages are all 0 out of the mean over the step."""
    entropy_control: EntropySection | None = None
    """Raise the weight of the entropy while the policy's entropy is below a target."""
    off_policy_mask: float | None = Field(None, gt=0)
    """Leave out completions of negative advantage whose tokens became less likely by more than so many nats on average since they were
    sampled (try 0.5). Matters with several updates per rollout batch, ``replay``, or an inexact engine."""
    positive_weight: float = Field(1.0, ge=0)
    """Factor of advantages above 0; 0.1 with ``advantage: reinforce`` is W-REINFORCE."""
    sampler_correction: CorrectionSection | None = Field(default_factory=CorrectionSection)
    """Correct the loss for an engine whose log-probs differ from the trainer's; null does not."""
    top_entropy_share: float = Field(1.0, gt=0, le=1)
    """Share of a step's tokens that the loss counts: those where the policy was least certain."""
    update_share: float = Field(1.0, gt=0, le=1)
    """Share of each group that the update computes, its rewards furthest apart (PODS)."""


@extension
class Weights(Extension):
    name, keys, order = "weights", {"grpo": _Keys}, 30

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self.section = recipe.grpo
        control = self.section.entropy_control
        self.needs_every_row = control is not None
        self.coefficient = control.start if control else 0.0

    @classmethod
    def takes_part(cls, recipe: Any) -> bool:
        return bool(recipe.grpo.enabled)

    def check(self, plan: Any) -> Iterable[str]:
        section = self.section
        by_part = plan.objective is not None and plan.objective.loss.reduction == "micro-batch-token-mean"
        if section.drop_equal_groups and by_part:
            yield (
                "grpo.drop_equal_groups with a mean over micro-batches: which of them a group is in decides what it is divided by; take "
                "grpo.reduction=token-mean"
            )
        least = round(section.update_share * section.group_size)
        if section.update_share < 1 and least < 2:
            yield (
                f"grpo.update_share={section.update_share:g} of a group of {section.group_size} is {least}; two are compared at least: take "
                f"grpo.update_share={2 / section.group_size:g}"
            )
        inexact = section.sampler_correction is not None and not ENGINES.get(section.engine).exact
        if inexact and section.loss.name == "vespo":
            yield (
                "grpo.loss=vespo is not corrected for a sampler that differs from the trainer; take grpo.sampler_correction=null"
            )

    def prepare(self, model: Any, trainer: PolicyTrainer) -> None:
        self.needs_old_log_probs = self.section.sampler_correction is not None and not is_exact(
            trainer.engine
        )

    def batch(self, batch: Batch, policy: PolicyTrainer) -> Batch:
        if self.section.update_share < 1:
            batch = keep_furthest(batch, policy, self.section)
        if self.section.positive_weight != 1:
            batch = weigh_positive(batch, self.section.positive_weight)
        if self.section.drop_equal_groups:
            batch = drop_equal_groups(batch, policy, self.section.group_size)
        if self.needs_old_log_probs:
            batch = correct_sampler(batch, policy, self.section.sampler_correction)
        return batch

    def update(self, batch: Batch, policy: PolicyTrainer) -> Batch:
        share = self.section.top_entropy_share
        return batch if share == 1 else count_top_entropy(batch, policy, share)

    def loss(self, inputs: LossInputs) -> None:
        if self.section.off_policy_mask is not None:
            mask_off_policy(inputs, self.section.off_policy_mask)

    def seen(self, event: Event) -> Control | None:
        if event.kind != "gradient" or self.section.entropy_control is None:
            return None
        used = self.entropy_bonus
        self.coefficient, self.entropy_bonus = follow_entropy(
            self.section.entropy_control, event.values.get("entropy", math.nan), self.coefficient, used
        )
        return Control(
            metrics={"entropy_control/bonus": used, "entropy_control/coefficient": self.coefficient}
        )

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient, "bonus": self.entropy_bonus}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coefficient, self.entropy_bonus = state["coefficient"], state["bonus"]


def counted(batch: Batch, factors: Tensor) -> Batch:
    """Return a batch whose tokens count as often as before, times ``factors`` (B, T)."""
    return replace(batch, counted=factors if batch.counted is None else batch.counted * factors)


def keep_furthest(batch: Batch, policy: PolicyTrainer, section: Any) -> Batch:
    """Leave out of each group all but the m completions whose advantages vary most, which then have the mean that all n had.

    A loss that is a mean over completions is one over those kept. With rewards of 0 and 1 of which a share q is right among those kept, a
    group of a baseline pushes by q (1 - q) / (p (1 - p)) ∇p for a problem of pass rate p, in expectation over the groups: a factor of
    about 1 for problems of middle difficulty, of up to n / m for the easiest and hardest (all n push by 1 - 1/n). What is optimised
    stays monotone in p, and rare answers count more.

    Source: PODS (2504.13818) algorithm 2, max-variance down-sampling.
    """
    value = (batch.advantages * batch.mask).sum(1) / batch.mask.sum(1).clamp(min=1)
    up, down = (policy.everyone(part.clamp(min=0)) for part in (value, -value))
    value_PG = (up - down).view(-1, section.group_size)
    kept_PG = furthest_mask(value_PG, round(section.update_share * section.group_size))
    mean_P1 = (value_PG * kept_PG).sum(1, keepdim=True) / kept_PG.sum(1, keepdim=True)
    shift_PG = (mean_P1 - value_PG.mean(1, keepdim=True)).expand_as(value_PG)
    first = policy.rank * len(batch)
    kept, shift = (x.reshape(-1)[first : first + len(batch), None] for x in (kept_PG, shift_PG))
    factors = (kept * (section.group_size / kept_PG[0].sum())).expand(batch.mask.shape)
    return counted(replace(batch, advantages=(batch.advantages - shift) * kept), factors.contiguous())


def furthest_mask(value_PG: Tensor, count: int) -> Tensor:
    """Keep the ``count`` values of each row whose variance is largest, some of its least and some of its greatest; return (P, G) of bool.

    Source: PODS (2504.13818) section 3: no other choice has a larger variance.
    """
    import torch

    size, order_PG = value_PG.shape[1], value_PG.argsort(dim=1, stable=True)
    # one choice for each number of the least
    places = [[*range(low), *range(size - count + low, size)] for low in range(count + 1)]
    places_CK = torch.tensor(places, device=value_PG.device)
    values_PCK = value_PG.double().gather(1, order_PG)[:, places_CK]
    places_PK = places_CK[values_PCK.var(dim=2, correction=0).argmax(1)]
    return torch.zeros_like(value_PG, dtype=torch.bool).scatter_(1, order_PG.gather(1, places_PK), True)


def weigh_positive(batch: Batch, weight: float) -> Batch:
    """Weigh completions that did better than expected less than those that did worse, so that the policy keeps its variety.

    Source: the surprising effectiveness of negative reinforcement (2506.01347) section 5: W-REINFORCE is ``grpo.advantage=reinforce`` with
    weight 0.1; 0 is NSR, learning from wrong completions alone.
    """
    advantages = batch.advantages
    return replace(batch, advantages=advantages.where(advantages <= 0, advantages * weight))


def drop_equal_groups(batch: Batch, policy: PolicyTrainer, group_size: int) -> Batch:
    """Weigh the groups that teach up by those that do not: the step is as long as if these had not been sampled.

    Counted over all processes and steps of the rollout batch; unlike ``resample``, nothing is sampled in their places.

    Source: ScaleRL (2510.13786) section 3, zero-variance filtering.
    """
    lengths = policy.everyone(batch.mask.sum(1).float())
    teaches = policy.everyone(((batch.advantages != 0) & batch.mask).any(1).float()) > 0
    teaches = teaches.view(-1, group_size).any(1).repeat_interleave(group_size)
    if not teaches.any():
        return batch
    by_token = policy.objective.loss.reduction == "token-mean"
    scale = lengths.sum() / lengths[teaches].sum() if by_token else len(teaches) / teaches.sum()
    first = policy.rank * len(batch)
    factors = (teaches[first : first + len(batch)] * scale)[:, None].expand(batch.mask.shape)
    return counted(batch, factors.contiguous())


def correct_sampler(batch: Batch, policy: PolicyTrainer, section: CorrectionSection) -> Batch:
    """Weigh by truncated importance weights per token or sequence for a sampler that differs from the trainer.

    Source: F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025) for tokens; J. Liu et al., "When
    speed kills stability" (2025) for sequences and masks.
    """
    from algorist.objectives import sampler_weights
    from algorist.training.metrics import Metrics

    old, sampler = batch.old_log_probs, batch.sampler_log_probs
    if old is None or sampler is None:
        return batch
    weights = sampler_weights(old, sampler, batch.mask, section.mode, low=section.low, high=section.high)
    metrics = Metrics()
    for kind in ("mean", "min", "max"):
        metrics.add(f"sampling/importance_sampling_ratio/{kind}", weights, batch.mask)
    for kind in ("mean", "max"):
        metrics.add(f"sampling/sampling_logp_difference/{kind}", (old - sampler).abs(), batch.mask)
    metrics.add("sampling/masked_share", weights.expand_as(batch.mask) == 0, batch.mask)
    policy.note(metrics)
    return replace(batch, policy_weights=weights.expand_as(batch.mask).contiguous())


def count_top_entropy(batch: Batch, policy: PolicyTrainer, share: float) -> Batch:
    """Count the tokens of highest entropy among the step's of all processes, where the policy decides.

    Source: Beyond the 80/20 rule (2506.01939).
    """
    from algorist.objectives import top_entropy_mask

    entropy = policy.log_probs_of(batch, entropy=True)
    mask = top_entropy_mask(entropy, batch.mask, policy.everyone(entropy[batch.mask]), share)
    return counted(batch, mask.float())


def mask_off_policy(inputs: LossInputs, threshold: float) -> None:
    """Leave out completions of negative advantage that the policy has already moved away from; what sampled is compared, where known.

    Source: DeepSeek-V3.2 (2512.02556) eq. 9.
    """
    from algorist.objectives import on_policy_sequences

    batch = inputs.batch
    sampler = batch.sampler_log_probs if batch.sampler_log_probs is not None else batch.old_log_probs
    if sampler is None:
        return
    if batch.old_log_probs is not None:  # a replayed group has its sampler's log-probs there
        sampler = sampler.where(~sampler.isnan(), batch.old_log_probs)
    learned = on_policy_sequences(inputs.inside, sampler, batch.advantages, batch.mask, threshold)
    inputs.metrics.add("off_policy_mask/masked", (~learned).float(), batch.mask)
    inputs.factors.append(learned.float())


def follow_entropy(
    section: EntropySection, entropy: float, coefficient: float, bonus: float
) -> tuple[float, float]:
    """Return the next coefficient and entropy bonus: one that grows while the policy is more certain than it should be, else is off.

    With c the coefficient, Δ its step and e_k the mean entropy of the tokens of step k, as Skywork-OR1 (2505.22312, adaptive entropy
    control) and TRL's ``use_adaptive_entropy``:

        c ← c + Δ where e_k ≤ target, else c - Δ, within [0, most];    the bonus of step k + 1 is c where e_k ≤ target, else 0

    The first step, before any entropy is known, has no bonus; a step whose entropy is not known changes nothing.
    """
    if math.isnan(entropy):
        return coefficient, bonus
    low = entropy <= section.target
    coefficient = min(max(coefficient + (section.step if low else -section.step), 0.0), section.most)
    return coefficient, coefficient if low else 0.0
