"""The GRPO step on one page: problems → groups → advantages → batch → log-probs → loss. Order on the page is order in time.

For each problem q a group of G completions o_1 … o_G is sampled from the policy π_old and rewarded; the policy π_θ then minimises

    L(θ) = Σ_i Σ_t w_it · [ -min(r_it·A_i, clip(r_it, 1 - ε_low, 1 + ε_high)·A_i) + β·k3(π_θ, π_ref) ]

with the ratio r_it = π_θ(o_it | q, o_i,<t) / π_old(o_it | q, o_i,<t), the advantage A_i = (R_i - mean R) / (std R + 1e-4) over the
group, and weights w_it that average over tokens. Loss, weights and advantage are functions of ``objectives`` that a recipe chooses
by name, or a user's own (``grpo.loss``, ``grpo.advantage``). ``objective.py`` has them; what is optional is an extension.

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
6. Extensions may replace groups of equal rewards before the step (``grpo.resample``): L is then the mean over useful groups.
7. ``grpo.entropy_bonus`` subtracts c·H(π_θ(· | q, o_i,<t)) from the loss of each token, with the gradient of the whole distribution.
8. A sampler that differs from the trainer (another program, another type) is corrected by a truncated ratio per token or sequence.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from algorist.objectives import Objective
from algorist.training.batch import Batch
from algorist.training.extension import Event, Extensions, PolicyTrainer, Sampled, SamplingTrainer
from algorist.training.metrics import Averages, Metrics
from algorist.training.objective import LossInputs, advantages_of, loss_of, of_heads, rows_to_compute
from algorist.types import Group, Problem

if TYPE_CHECKING:
    from algorist.training.passes import Passes


class Learner(Protocol):
    """Trainer interface that an update needs."""

    objective: Objective
    extensions: Extensions
    passes: Passes
    averages: Averages

    def weights_of(self, batch: Batch) -> Tensor:
        """Return the weights (B, T) of a step's tokens."""

    def count(self, metrics: Metrics, log_probs: Tensor, batch: Batch) -> None:
        """Count the metrics of a micro-batch beyond its loss."""

    def count_skipped(self, metrics: Metrics, batch: Batch, computed: Sequence[int]) -> None:
        """Count the completions that needed no pass."""

    def add_up(self, metrics: Metrics) -> dict[str, float]:
        """Return the metrics of all processes."""


class Collector(Learner, SamplingTrainer, PolicyTrainer, Protocol):
    """Trainer interface that a GRPO step needs in addition."""

    position: int
    """Steps done on the rollout batch in use."""

    @property
    def steps_per_rollouts(self) -> int:
        """Steps that a rollout batch feeds."""

    def begin_rollout_batch(self, batch: Batch) -> None:
        """Deal its completions to the steps that it feeds."""

    def share_of_step(self) -> Batch:
        """Return the completions that this step learns from."""

    def end_step(self) -> None:
        """Count the step."""

    def share_of(self, groups: Sequence[Group], advantages_PG: Tensor) -> Batch:
        """Return this process's completions of all groups."""

    def rows_of(self, places: Sequence[int]) -> list[int]:
        """Return the rows of this process's completions in the groups at ``places``."""

    def log_rollouts(self, sampled: Sampled, advantages_PG: Tensor) -> None:
        """Count and store what was sampled."""


def train_step(trainer: Collector, model: Any, problems: Sequence[Problem]) -> Tensor:
    """Return the loss of one optimizer step, its gradient in the parameters; the trainer's loop then clips and steps.

    Args:
        trainer: Samples, computes log-probs, knows processes and memory.
        model: The policy as the loop wraps it.
        problems: Those of the rollout batch that this step belongs to.
    """
    began = time.perf_counter()
    if trainer.position == 0:
        trainer.begin_rollout_batch(roll_out(trainer, problems))
    sampled = time.perf_counter()
    batch = trainer.share_of_step()
    for extension in trainer.extensions:
        batch = extension.update(batch, trainer)
    loss = update(trainer, model, batch)
    trainer.end_step()
    now = time.perf_counter()
    trainer.averages.add({"time/update_s": now - sampled, "time/step_s": now - began})
    return loss


def roll_out(trainer: Collector, problems: Sequence[Problem]) -> Batch:
    """Return this process's share of a rollout batch; advantages, store and metrics see the groups of all processes."""
    began = time.perf_counter()
    # problems: extensions may choose others, and may have their groups already
    sampled = Sampled(list(problems))
    trainer.extensions.problems(sampled, trainer)
    # groups: collect() samples, parses, grades and rewards; extensions may put others in their places
    sampled.groups = sampled.groups or trainer.sample(sampled.problems)
    sampled.seconds = sampled.groups[0].seconds
    for extension in trainer.extensions:
        extension.groups(sampled, trainer)
    # advantages: rewards (P, G) → (P, G), one number a token from here on
    advantages_PG = advantages_of(sampled.groups, trainer.objective)
    paid = time.perf_counter()
    # batch: numbers per token (B, T)
    batch = with_old_log_probs(trainer, trainer.share_of(sampled.groups, advantages_PG), sampled.earlier)
    for extension in trainer.extensions:
        batch = extension.batch(batch, trainer)
    trainer.log_rollouts(sampled, advantages_PG)
    made = time.perf_counter() - paid
    trainer.averages.add({"time/reward_s": paid - began - sampled.seconds, "time/batch_s": made})
    return batch


def with_old_log_probs(trainer: Collector, batch: Batch, earlier: Sequence[int]) -> Batch:
    """Add log π_old where the ratio is not 1: where a batch feeds several steps, or an earlier policy sampled some of it.

    Args:
        trainer: Computes them.
        batch: This process's share.
        earlier: Places of groups of an earlier policy, whose sampler's log-probs are those of that policy.
    """
    by_trainer = batch.sampler_log_probs is not None and any(
        e.needs_old_log_probs for e in trainer.extensions
    )
    if not (by_trainer or trainer.steps_per_rollouts > 1 or earlier):
        return batch
    exact = trainer.sampler_is_exact(batch) and not by_trainer
    old = batch.sampler_log_probs if exact else trainer.log_probs_of(batch)
    sampler = batch.sampler_log_probs
    if earlier and old is not None and sampler is not None:
        rows = trainer.rows_of(earlier)
        old, sampler = old.clone(), sampler.clone()
        old[rows] = sampler[rows]
        sampler[rows] = torch.nan  # nothing to compare the trainer of now with
    return replace(batch, old_log_probs=old, sampler_log_probs=sampler)


def update(learner: Learner, model: Any, batch: Batch) -> Tensor:
    """Return the loss of a step of SFT or GRPO, its gradient in the parameters; in smaller parts when memory runs out."""
    loss, metrics = learner.passes.until_they_fit(
        model,
        batch,
        lambda: rows_to_compute(batch, learner.objective, learner.extensions),
        lambda policy: in_parts(learner, policy, batch),
    )
    values = learner.add_up(metrics)
    learner.averages.add(values | {**learner.extensions.seen(Event("gradient", values=values)).metrics})
    return loss


def in_parts(learner: Learner, model: Any, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return loss and metrics of this process after forward and backward of each part."""
    objective, extensions, passes, metrics = learner.objective, learner.extensions, learner.passes, Metrics()
    weights = learner.weights_of(batch)
    rows = rows_to_compute(batch, objective, extensions)
    total = torch.zeros((), device=batch.mask.device)

    def one_pass(part: list[int], idle: bool) -> None:
        piece = batch.take(part)
        log_probs, entropy = passes.log_probs(
            model, piece, compute_entropy=not idle, of_head={} if idle else of_heads(extensions, piece)
        )
        if idle:  # another process has one more part, and each pass needs all of them
            return passes.backward(log_probs.sum() * 0)
        part_weights = weights[torch.tensor(part, device=weights.device), : piece.width]
        loss = loss_of(LossInputs(log_probs, entropy, piece, part_weights, metrics), objective, extensions)
        passes.backward(loss)
        total.add_(loss.detach())
        learner.count(metrics, log_probs.detach(), piece)

    passes.run(batch, rows, one_pass)
    learner.count_skipped(metrics, batch, rows)
    return total, metrics
