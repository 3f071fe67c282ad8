"""The ledger of the update: what moved the weights, as quantities of every step (``ledger/…`` in the metrics).

Of the rewards: each one's share of the advantages, and how advantages agree with correctness. Of the tokens: on which of them the
advantages lie. Of the weights: the length of a step by cause. It reads and changes nothing: the same weights with and without it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from algorist.config.section import Section
from algorist.errors import is_out_of_memory
from algorist.extensions.ledger.rules import RULES
from algorist.training.extension import (
    Control,
    Event,
    Extension,
    PolicyTrainer,
    Sampled,
    SamplingTrainer,
    extension,
)

if TYPE_CHECKING:
    from algorist.extensions.ledger.weights import StepWatch
    from algorist.training.batch import Batch

log = logging.getLogger("algorist.extensions.ledger")
BY_REWARD = "ledger/by_reward"
"""The advantages (B, T) as rewards made them, in ``Batch.extra``; after the last extension only where one has changed them."""
CORRECT = "ledger/correct"
"""Advantages (B, T) of correctness alone, in ``Batch.extra``, where several rewards have weights."""
SFT_EVERY = 4
"""Steps of SFT of which one is measured: they are much shorter than those of GRPO."""
CHART = (
    "Ledger: rewards",
    "Share of each reward in the advantages; agreement of advantage and reward with correctness should stay above 0.",
    ("ledger/reward/*", "ledger/correct/*", "ledger/added"),
    ("ledger/",),
)
STEP_CHART = (
    "Ledger: a step",
    "Change of the weights in one step relative to their length, by gradient and by decay.",
    ("ledger/step/length", "ledger/step/gradient", "ledger/step/decay"),
    ("ledger/step/",),
)
TERM_CHART = (
    "Ledger: gradient",
    "Share of each term in the gradient of a step, and its cosine with the gradient of correctness alone.",
    ("ledger/gradient/share/*", "ledger/gradient/cosine"),
    ("ledger/gradient/",),
)
TOKEN_CHART = (
    "Ledger: tokens",
    "Share of the advantages on some tokens, of the peak rate, and of the gradient that max_grad_norm leaves.",
    ("ledger/tokens/*", "ledger/step/schedule", "ledger/step/clipped"),
    ("ledger/",),
    True,
)


class _Keys(Section):
    ledger_every: int = Field(20, ge=0)
    """Steps between two gradients that are told apart by term; 0 for none."""


class _Always(Extension):
    """Takes part in every run of GRPO or SFT."""

    @classmethod
    def takes_part(cls, recipe: Any) -> bool:
        return bool(recipe.grpo.enabled or recipe.sft.enabled)


@extension
class BeforeOthers(_Always):
    """Notes the advantages before other extensions change them."""

    name, order = "ledger_before", 0

    def batch(self, batch: Batch, policy: PolicyTrainer) -> Batch:
        return replace(batch, extra={**batch.extra, BY_REWARD: batch.advantages})


@extension
class Ledger(_Always):
    name, keys, order = "ledger", {"grpo": _Keys}, 100
    charts, rules = (CHART, TERM_CHART, STEP_CHART, TOKEN_CHART), RULES
    sampled: Sampled | None = None
    silent = False
    watch: StepWatch | None = None

    def problems(self, sampled: Sampled, sampler: SamplingTrainer) -> None:
        self.sampled = sampled

    def batch(self, batch: Batch, policy: PolicyTrainer) -> Batch:
        extra = dict(batch.extra)
        by_reward, sampled, self.sampled = extra.pop(BY_REWARD, None), self.sampled, None
        metrics, right = _entries(batch, sampled, by_reward, policy)
        policy.note(metrics)
        if self.recipe is not None and not self.recipe.grpo.ledger_every:
            return replace(batch, extra=extra)
        if by_reward is not None and not by_reward.equal(batch.advantages):
            extra[BY_REWARD] = by_reward
        if right is not None and sum(map(bool, policy.objective.reward_weights.values())) > 1:
            extra[CORRECT] = right.to(batch.mask.device)[:, None].expand(batch.mask.shape)
        return replace(batch, extra=extra)

    def update(self, batch: Batch, policy: PolicyTrainer) -> Batch:
        trainer = self.watch.trainer if self.watch is not None else None
        every = self.recipe.grpo.ledger_every if self.recipe is not None else 0
        if trainer is None or not every or trainer.state.global_step % every != min(1, every - 1):
            return batch
        from algorist.extensions.ledger.gradient import measured, why_not

        reason = why_not(trainer)
        if not reason and not self.silent:
            try:
                values = measured(batch, trainer)
                trainer.averages.add({f"ledger/gradient/{name}": value for name, value in values.items()})
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = "no memory is left for it"
        if reason and not self.silent:
            log.warning("the gradient is not told apart by term: %s", reason)
            self.silent = True
        return batch

    def seen(self, event: Event) -> Control | None:
        if event.kind == "stage" and event.trainer is not None:
            from algorist.extensions.ledger.weights import StepWatch

            self.watch = StepWatch(event.trainer, every=SFT_EVERY if event.stage == "sft" else 1)
            event.trainer.add_callback(self.watch)
        if event.kind == "gradient" and self.watch is not None:
            self.watch.on_gradient()
        if event.kind == "stage_end":
            self.watch = None
        return None


def _entries(batch: Batch, sampled: Sampled | None, by_reward: Any, policy: PolicyTrainer) -> Any:
    """Return the entries of a rollout batch as metrics that add up over processes, and the centred correctness (B,) or None."""
    from algorist.extensions.ledger.shares import (
        centred_correctness,
        mean_advantages,
        reward_sums,
        token_sums,
    )
    from algorist.training.metrics import Metrics

    metrics = Metrics()
    advantages, mask = batch.advantages.detach().cpu(), batch.mask.cpu()
    if by_reward is not None:
        whole = float(advantages[mask].abs().sum())
        if whole and (added := float((advantages - by_reward.cpu())[mask].abs().sum())):
            metrics.add_sum("ledger/added", added, added + float(by_reward.cpu()[mask].abs().sum()))
    groups = sampled.groups if sampled is not None else []
    size = len(groups[0].rollouts) if groups else 1
    first = policy.rank * len(batch)
    if first % size or len(batch) % size or first + len(batch) > size * len(groups):
        return metrics, None  # groups that lie on two processes
    groups = groups[first // size : (first + len(batch)) // size]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for name, (part, whole) in token_sums(rollouts, advantages, mask).items():
        metrics.add_sum(f"ledger/tokens/{name}", part, whole)
    means = mean_advantages(advantages, mask).view(-1, size)
    shares, agree = reward_sums(groups, policy.objective.reward_weights, means)
    for name, (part, whole) in shares.items():
        metrics.add_sum(f"ledger/reward/{name}", part, whole)
    for name, value in agree.items():
        metrics.add_sum(f"ledger/correct/{name}", value * len(rollouts), len(rollouts))
    return metrics, centred_correctness(groups)
