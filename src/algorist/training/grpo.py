"""GRPO in transformers' training loop: ``step.py`` says what a step computes, this file when, on which rows and in which parts.

One item of the data loader is one optimizer step. The first step of a rollout batch collects it; its completions are dealt to the
steps that it feeds. The loop, the optimizer, schedules, callbacks and distributed wrappers are transformers' and accelerate's.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from algorist.config.schema import GRPOSection
from algorist.grading.workers import stats
from algorist.objectives import token_losses, top_entropy_mask
from algorist.prompts import PromptFormat
from algorist.rewards import RewardSet
from algorist.rollouts.base import RolloutEngine, SamplingParams
from algorist.rollouts.collect import collect
from algorist.training import step
from algorist.training.batch import Batch
from algorist.training.checkpoint import ExactCheckpoints
from algorist.training.faults import FiniteSteps, until_it_fits
from algorist.training.group_rewards import useful
from algorist.training.log_probs import LogProbs
from algorist.training.metrics import Averages, Metrics, rollout_metrics
from algorist.training.order import ProblemOrder, Reserve, Schedule, join_groups, parts_of
from algorist.training.part_size import tokens_that_fit
from algorist.training.policy_engine import PolicyEngine
from algorist.training.pools import Pools
from algorist.training.processes import reminder
from algorist.training.reference import Reference
from algorist.training.refill import Filled, refill
from algorist.training.replay import Replay
from algorist.training.sharding import average_gradients, passes_of_all
from algorist.types import Group, Problem

log = logging.getLogger("algorist.training.grpo")

OnRollouts = Callable[[int, list[Group], Tensor], None]
LIMITS = ("timeout", "memory", "crashed")
"""Answers of a rollout batch that the grader could not decide within its limits, by reason: metrics ``grading/…``."""
SEED_STRIDE = 1_000_003


class AlgoristGRPOTrainer(ExactCheckpoints, Trainer):
    """Trains a policy by GRPO.

    Args, beside those of ``make_grpo_trainer``:
        args: transformers' arguments; ``gradient_accumulation_steps`` is 1, a step's parts are made here.
        objective: What a step minimises.
        sampling: How; its ``seed`` advances by one stride per rollout batch.
    """

    def __init__(
        self,
        *,
        model: Any,
        tokenizer: Any,
        problems: Sequence[Problem],
        prompt_format: PromptFormat,
        section: GRPOSection,
        rewards: RewardSet,
        args: TrainingArguments,
        objective: step.Objective,
        engine: RolloutEngine,
        sampling: SamplingParams,
        matcher: str = "symbolic",
        on_rollouts: OnRollouts | None = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        self.tokenizer, self.problems, self.prompt_format = tokenizer, list(problems), prompt_format
        self.rewards, self.matcher, self.on_rollouts = rewards, matcher, on_rollouts
        self.objective: step.Objective = objective
        self.section, self.schedule = section, Schedule.from_section(section)
        self.engine, self.sampling = engine, sampling
        self.part_tokens = tokens_that_fit(model, section)
        self.reserve = Reserve(self.problems, args.seed)
        self.replay = Replay(section.replay, self.problems) if section.replay else None
        self.pools = Pools(section.pools) if section.pools else None
        self.log_probs = LogProbs(temperature=sampling.temperature)
        self.reference = Reference(model) if objective.beta else None
        self.generation_count = 0
        self.position = 0  # steps done on the present rollout batch
        self.rollouts: Batch | None = None
        self.dealt: list[list[int]] = []
        self.tokens_per_step = 0.0
        self.averages = Averages()
        self.graded = stats()
        super().__init__(model=model, args=args, processing_class=tokenizer, callbacks=list(callbacks))
        self.faults = FiniteSteps(self.state_of_step, self.averages.add)
        self.add_callback(self.faults)

    # ---- data --------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader whose items are the problems of a rollout batch, once for each step that it feeds."""
        return ProblemOrder.loader(
            self.problems, self.schedule.problems(self.args.world_size), self.schedule.steps, self.args.seed
        )

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: transformers' estimate knows neither rollouts nor shared prompts."""
        return 0

    # ---- one step ----------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Sample if the rollout batch is used up, then compute loss and gradient of one optimizer step."""
        began = time.perf_counter()
        model.train()
        if self.rollouts is None or self.position == 0:
            self.rollouts = self._roll_out(model, inputs)
        sampled = time.perf_counter()
        batch = self.rollouts.take(self.dealt[self.position % self.schedule.shares])
        fresh = self.position == 0
        loss = self._update(model, batch, fresh)
        self.position = (self.position + 1) % self.schedule.steps
        now = time.perf_counter()
        self.averages.add({"time/update_s": now - sampled, "time/step_s": now - began})
        return loss

    def _roll_out(self, model: Any, problems: Sequence[Problem]) -> Batch:
        """Collect a rollout batch: this process's share as a batch; everybody's groups for advantages, store and metrics."""
        began = time.perf_counter()
        rank, processes = self.args.process_index, self.args.world_size
        problems = self._awake(problems)
        filled = self._filled(self._sample(problems), problems)
        replayed: list[int] = []
        if self.replay is not None:
            replayed = self.replay.fill(filled, self._useful(filled.groups), self._useful(filled.spare))
        groups = filled.groups
        advantages_PG = step.advantages_of(groups, self.objective)
        first = self.schedule.rows * rank
        batch = Batch.from_groups(
            parts_of(groups, self.schedule, rank, processes),
            advantages_PG.flatten()[first : first + self.schedule.rows],
            device=self.args.device,
            mask_truncated=self.objective.mask_truncated,
        )
        batch = self._with_old_and_reference(model, batch, replayed)
        self.dealt = step.deal(len(batch), self.schedule.shares)
        tokens = self.accelerator.gather(batch.mask.sum()).sum() / self.schedule.shares
        self.tokens_per_step = max(1.0, float(tokens)) / processes
        self._log_rollouts(filled, advantages_PG, batch, replayed)
        self.averages.add({"time/reward_s": time.perf_counter() - began - filled.seconds})
        return batch

    def _awake(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the problems of a rollout batch with others for those that rest, as far as there are others."""
        if self.pools is None:
            return list(problems)
        resting = self.pools.resting()
        awake = [p for p in problems if p.id not in resting]
        fresh = self.reserve.draw(len(problems) - len(awake), without=resting | {p.id for p in awake})
        asleep = [p for p in problems if p.id in resting]
        return [*awake, *fresh, *asleep][: len(problems)]

    def _sample(self, problems: Sequence[Problem]) -> list[Group]:
        """Return the groups of ``problems`` from all processes; every process must call this."""
        rank, processes = self.args.process_index, self.args.world_size
        share = self.schedule.share(len(problems), rank, processes)
        seed = self.sampling.seed
        if seed is not None:
            seed += SEED_STRIDE * self.generation_count
        groups = collect(
            PolicyEngine(self.engine, self, rank * len(problems) * self.schedule.group_size // processes),
            self.tokenizer,
            [problems[place] for place, _ in share],
            self.prompt_format,
            replace(self.sampling, seed=seed),
            [count for _, count in share],
            rewards=self.rewards,
            matcher=self.matcher,
            extra={"trainer_state": self.state, "log_metric": lambda n, v: self.averages.add({n: v})},
        )
        self.generation_count += 1
        with reminder("for the rollouts of the other processes"):
            return join_groups(self.accelerator, share, groups)

    def _filled(self, groups: list[Group], problems: Sequence[Problem]) -> Filled:
        """Return a rollout batch with its useless groups replaced, as far as the recipe wants that."""
        if self.section.resample is None:
            return Filled(groups, seconds=groups[0].seconds)
        ids = {problem.id for problem in problems} | (self.pools.resting() if self.pools else set())

        def draw(number: int) -> list[Group]:
            fresh = self.reserve.draw(number, without=ids)
            ids.update(problem.id for problem in fresh)
            return self._sample(fresh) if fresh else []

        least = math.ceil(self.args.world_size / self.schedule.group_size)  # work for every process
        return refill(groups, draw, self._useful, self.section.resample, least=least)

    def _useful(self, groups: Sequence[Group]) -> list[bool]:
        return useful(groups, step.single_rewards(self.objective))

    def _with_old_and_reference(self, model: Any, batch: Batch, replayed: Sequence[int] = ()) -> Batch:
        """Add what later steps compare with: log-probs of the policy that sampled, and of the reference.

        ``replayed`` are the places of groups of an earlier policy, whose sampler's log-probs are those of that policy.
        """
        correct = self.objective.correction is not None and batch.sampler_log_probs is not None
        if correct or self.schedule.steps > 1 or replayed:
            if self._sampler_is_exact(batch) and not correct:
                batch = replace(batch, old_log_probs=batch.sampler_log_probs)
            else:
                batch = replace(batch, old_log_probs=self._without_gradient(model, batch))
        if replayed and batch.old_log_probs is not None and batch.sampler_log_probs is not None:
            rows = self.schedule.rows_of(replayed, self.args.process_index)
            old, sampler = batch.old_log_probs.clone(), batch.sampler_log_probs.clone()
            old[rows] = sampler[rows]
            sampler[rows] = math.nan  # nothing to compare the trainer of now with
            batch = replace(batch, old_log_probs=old, sampler_log_probs=sampler)
        if self.reference is not None:
            with self.reference.active(self.accelerator.unwrap_model(model)) as reference:
                found = self._without_gradient(reference if reference is not None else model, batch)
            batch = replace(batch, ref_log_probs=found)
        return batch

    def _sampler_is_exact(self, batch: Batch) -> bool:
        """Whether the sampler computed what the trainer would: both in float32, on weights that are the trainer's."""
        weights = next(iter(self.model.parameters())).dtype
        exact = weights == torch.float32 and not self.args.bf16 and not self.args.fp16
        known = batch.sampler_log_probs is not None and not bool(batch.sampler_log_probs.isnan().any())
        return exact and known and self.sampling.temperature > 0

    @torch.no_grad()
    def _without_gradient(self, model: Any, batch: Batch, *, entropy: bool = False) -> Tensor:
        """Return the log-probs (B, T) of a whole batch, part by part; or with ``entropy`` those of the next-token distributions."""
        found = torch.zeros(len(batch), batch.width, device=batch.mask.device)
        rows = batch.in_group_order(range(len(batch)))
        for part in self._passes(batch, self._parts(batch, rows)):
            both = self.log_probs(
                model, batch.take(part), compute_entropy=entropy, autocast=self.accelerator.autocast
            )
            values = both[entropy]
            assert values is not None
            found[torch.tensor(part, device=found.device), : values.shape[1]] = values
        return found

    def _passes(self, batch: Batch, parts: list[list[int]]) -> list[list[int]]:
        """Add passes over the shortest completion where other processes have more parts and each pass needs all of them."""
        idle = passes_of_all(self.accelerator, len(parts)) - len(parts)
        return parts + [[min(range(len(batch)), key=lambda row: len(batch.completions[row]))]] * idle

    # ---- update ------------------------------------------------------------------------------------------------

    def _update(self, model: Any, batch: Batch, fresh: bool) -> Tensor:
        """Return the loss of a step, its gradient in the parameters; in smaller parts when memory runs out.

        Under DDP the parts run in the model inside, and the gradients are averaged when all are done: a process that runs out of
        memory does its share again while the others wait for it.
        """
        replicated = isinstance(model, DistributedDataParallel)
        policy = model.module if replicated else model
        counted = self._top_entropy(policy, batch) if self.objective.top_entropy_share < 1 else None
        loss, metrics = until_it_fits(
            self,
            policy,
            lambda: self._in_parts(policy, batch, fresh, counted),
            lambda: self._halve(batch),
            alone=replicated or self.args.world_size == 1,
        )
        if replicated:
            with reminder("for the gradients of the other processes"):
                average_gradients(policy)
        self._merge(metrics)
        self.averages.add(metrics.values())
        return loss

    def _in_parts(
        self, model: Any, batch: Batch, fresh: bool, counted: Tensor | None
    ) -> tuple[Tensor, Metrics]:
        """Return the loss and the metrics of this process after forward and backward of each part; ``counted`` are the tokens (B, T)."""
        objective, metrics = self.objective, Metrics()
        weights = step.step_weights(
            batch, objective, tokens=self.tokens_per_step, micro_batch=self.schedule.micro_batch
        )
        if counted is not None:
            weights = weights * counted
        rows = step.rows_to_compute(batch, objective)
        parts = self._parts(batch, rows)
        total = torch.zeros((), device=self.args.device)
        passes = self._passes(batch, parts)
        for number, part in enumerate(passes, start=1):
            piece = batch.take(part)
            if number > len(parts):
                self.accelerator.sync_gradients = number == len(passes)
                log_probs, _ = self.log_probs(model, piece, autocast=self.accelerator.autocast)
                self.accelerator.backward(log_probs.sum() * 0)
                continue
            index = torch.tensor(part, device=weights.device)
            self.accelerator.sync_gradients = number == len(passes)  # DeepSpeed's engine steps then
            log_probs, entropy = self.log_probs(
                model, piece, compute_entropy=True, autocast=self.accelerator.autocast
            )
            loss = step.loss_of(log_probs, entropy, piece, weights[index, : piece.width], objective, metrics)
            self.accelerator.backward(loss)
            total += loss.detach()
            if fresh and objective.correction is None:
                _add_gap(metrics, log_probs.detach(), piece)
        self._add_skipped(metrics, batch, rows)
        return total, metrics

    def _top_entropy(self, model: Any, batch: Batch) -> Tensor:
        """Return which tokens (B, T) the loss counts: those of highest entropy among the step's of all processes."""
        entropy = self._without_gradient(model, batch, entropy=True)
        own = self.accelerator.pad_across_processes(entropy[batch.mask], dim=0, pad_index=-1.0)
        everyone = self.accelerator.gather(own)
        return top_entropy_mask(
            entropy, batch.mask, everyone[everyone >= 0], self.objective.top_entropy_share
        )

    def _add_skipped(self, metrics: Metrics, batch: Batch, computed: Sequence[int]) -> None:
        """Count the completions that were left out: ratio 1, and as entropy what their own log-probs estimate."""
        left = sorted(set(range(len(batch))) - set(computed))
        if not left:
            return
        rest = batch.take(left)
        _, values = token_losses(
            torch.zeros(rest.mask.shape, device=rest.mask.device),
            rest.advantages,
            rest.mask,
            loss=self.objective.loss,
            **self.objective.parameters,
        )
        for name, value in values.items():
            metrics.add(name, value, rest.mask)
        sampling = self.sampling
        filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        if rest.sampler_log_probs is not None and not filtered:  # unbiased without filters
            metrics.add("entropy", -rest.sampler_log_probs, rest.mask)

    def _parts(self, batch: Batch, rows: Sequence[int]) -> list[list[int]]:
        return batch.parts(rows, most_rows=self.schedule.micro_batch, most_tokens=self.part_tokens)

    def _halve(self, batch: Batch) -> bool:
        """Halve the tokens of a part, or spare memory for a single completion; return False when there is nothing left to try."""
        rows = step.rows_to_compute(batch, self.objective)
        largest = max(self._parts(batch, rows), key=batch.packed_tokens)
        tokens = batch.packed_tokens(largest)
        if len(largest) <= 1:
            return self.log_probs.spare_memory(self.model, tokens)
        self.part_tokens = max(1, tokens // 2)
        log.warning(
            "out of memory with %d tokens (%d completions) in one part of the update; continuing with parts of %d tokens, "
            "same mathematics",
            tokens,
            len(largest),
            self.part_tokens,
        )
        return True

    # ---- log ---------------------------------------------------------------------------------------------------

    def _log_rollouts(
        self, filled: Filled, advantages_PG: Tensor, batch: Batch, replayed: Sequence[int]
    ) -> None:
        fresh = [place for place in range(len(filled.groups)) if place not in replayed]
        groups = [*(filled.groups[place] for place in fresh), *filled.spare]
        advantages_PG = advantages_PG[fresh]
        if self.pools is not None:
            self.pools.see(groups)
            self.averages.add({"groups/resting": float(len(self.pools.resting()))})
        self.averages.add(rollout_metrics(groups, self.rewards.names, filled.seconds))
        if self.section.resample is not None or self.replay is not None:
            self.averages.add(filled.metrics(self._useful(filled.groups), len(replayed)))
        not_trained = advantages_PG.new_full((len(filled.spare), advantages_PG.shape[1]), math.nan)
        advantages_PG = torch.cat([advantages_PG, not_trained])
        self.state.num_input_tokens_seen += sum(
            len(group.prompt_ids) + len(r.completion_ids) for group in groups for r in group.rollouts
        )
        correction = step.sampler_correction(batch, self.objective)
        if correction is not None and batch.old_log_probs is not None:
            assert batch.sampler_log_probs is not None
            metrics = Metrics()
            gap = (batch.old_log_probs - batch.sampler_log_probs).abs()
            for kind in ("mean", "min", "max"):
                metrics.add(f"sampling/importance_sampling_ratio/{kind}", correction, batch.mask)
            for kind in ("mean", "max"):
                metrics.add(f"sampling/sampling_logp_difference/{kind}", gap, batch.mask)
            self._merge(metrics)
            self.averages.add(metrics.values())
        limits = stats()
        self.averages.add({f"grading/{n}": float(limits[n] - self.graded.get(n, 0)) for n in LIMITS})
        self.graded = limits
        if self.on_rollouts is not None and self.accelerator.is_main_process:
            self.on_rollouts(self.state.global_step, groups, advantages_PG)

    def _merge(self, metrics: Metrics) -> None:
        """Add up the metrics of all processes."""
        if self.args.world_size == 1:
            return
        from accelerate.utils import gather_object

        total = Metrics()
        for other in gather_object([metrics]):
            total.merge(other)
        metrics.sums = total.sums

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the means since the last line and the tokens so far."""
        means = self.averages.take()
        if "loss" in logs:
            means["num_tokens"] = float(self.state.num_input_tokens_seen)
        super().log({**logs, **means}, start_time)

    def state_of_step(self) -> dict[str, Any]:
        """Return the completions of the step that was just computed, for a saved batch."""
        assert self.rollouts is not None
        last = (self.position - 1) % self.schedule.steps % self.schedule.shares
        return self.rollouts.take(self.dealt[last]).to("cpu").state_dict()

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beyond transformers' own state: the rollout batch in use, position, counters."""
        states = {i: r.state_dict() for i, r in enumerate(self.rewards) if hasattr(r, "state_dict")}
        kept = self.rollouts if self.position else None
        return {
            **super().extra_state(),
            "generation_count": self.generation_count,
            "position": self.position,
            "rollouts": kept.to("cpu").state_dict() if kept is not None else None,
            "dealt": self.dealt,
            "tokens_per_step": self.tokens_per_step,
            "rewards": states,
            "reserve": self.reserve.position,
            "replay": self.replay.state_dict() if self.replay else None,
            "pools": self.pools.state_dict() if self.pools else None,
        }

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self.generation_count, self.position = state["generation_count"], state["position"]
        kept = state["rollouts"]
        self.rollouts = Batch(**kept).to(self.args.device) if kept is not None else None
        self.dealt, self.tokens_per_step = state["dealt"], state["tokens_per_step"]
        self.reserve.position = state.get("reserve", 0)  # not in checkpoints from before the refill
        for part, name in ((self.replay, "replay"), (self.pools, "pools")):
            if part is not None and state.get(name):
                part.load_state_dict(state[name])
        for index, reward_state in state["rewards"].items():
            self.rewards[index].load_state_dict(reward_state)


def _add_gap(metrics: Metrics, log_probs: Tensor, batch: Batch) -> None:
    """Count |trainer - sampler| of the log-probs on the tokens that were computed right after sampling."""
    if batch.sampler_log_probs is None:
        return
    gap = (log_probs - batch.sampler_log_probs).abs()
    metrics.add("sampling/sampling_logp_difference/mean", gap, batch.mask)
    metrics.add("sampling/sampling_logp_difference/max", gap, batch.mask)
