"""The ledger of the update: what moved the weights, as quantities of every step (``ledger/…`` in the metrics).

Of the rewards: each one's share of the advantages, and how advantages agree with correctness. Of the tokens: on which of them the
advantages lie. Of the weights: the length of a step by cause. It reads and changes nothing: the same weights with and without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from algorist.extensions.ledger.rules import RULES
from algorist.training.extension import Control, Event, Extension, Policy, Sampled, Sampler, extension

if TYPE_CHECKING:
    from algorist.extensions.ledger.weights import StepWatch
    from algorist.training.batch import Batch

BY_REWARD = "ledger/by_reward"
"""The advantages (B, T) as rewards made them, in ``Batch.extra`` until the last extension has seen the batch."""
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
TOKEN_CHART = (
    "Ledger: tokens",
    "Share of the advantages on some tokens, of the peak rate, and of the gradient that max_grad_norm leaves.",
    ("ledger/tokens/*", "ledger/step/schedule", "ledger/step/clipped"),
    ("ledger/",),
    True,
)


class _Always(Extension):
    """Takes part in every run of GRPO or SFT."""

    @classmethod
    def takes_part(cls, recipe: Any) -> bool:
        return bool(recipe.grpo.enabled or recipe.sft.enabled)


@extension
class BeforeOthers(_Always):
    """Notes the advantages before other extensions change them."""

    name, order = "ledger_before", 0

    def batch(self, batch: Batch, policy: Policy) -> Batch:
        return replace(batch, extra={**batch.extra, BY_REWARD: batch.advantages})


@extension
class Ledger(_Always):
    name, order = "ledger", 100
    charts, rules = (CHART, STEP_CHART, TOKEN_CHART), RULES
    sampled: Sampled | None = None
    watch: StepWatch | None = None

    def problems(self, sampled: Sampled, sampler: Sampler) -> None:
        self.sampled = sampled

    def batch(self, batch: Batch, policy: Policy) -> Batch:
        extra = dict(batch.extra)
        by_reward, sampled, self.sampled = extra.pop(BY_REWARD, None), self.sampled, None
        policy.note(_entries(batch, sampled, by_reward, policy))
        return replace(batch, extra=extra)

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


def _entries(batch: Batch, sampled: Sampled | None, by_reward: Any, policy: Policy) -> Any:
    """Return the entries of a rollout batch as metrics that add up over processes."""
    from algorist.extensions.ledger.shares import mean_advantages, reward_sums, token_sums
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
        return metrics  # groups that lie on two processes
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
    return metrics
