"""GRPO in transformers' training loop: ``step.py`` is the step, this file gives it rows, processes, parts of bounded size, state.

One item of the data loader is one optimizer step. The first step of a rollout batch collects it; its completions are dealt to the
steps that it feeds. The loop, the optimizer, schedules, callbacks and distributed wrappers are transformers' and accelerate's.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from algorist.config.schema import GRPOSection
from algorist.objectives import Objective, mean_lengths, token_losses
from algorist.prompts import PromptFormat
from algorist.rewards import RewardSet
from algorist.rollouts.base import RolloutEngine, SamplingParams
from algorist.rollouts.collect import collect
from algorist.training.batch import Batch
from algorist.training.checkpoint import ExactCheckpoints
from algorist.training.distributed import (
    PolicyEngine,
    SharedPasses,
    average_gradients,
    of_all,
    passes_of_all,
    reminder,
    shares_passes,
    without_buckets,
)
from algorist.training.extension import Extensions, Sampled
from algorist.training.faults import FiniteSteps
from algorist.training.lm_head import OfHead
from algorist.training.log_probs import LogProbs
from algorist.training.metrics import Averages, Metrics, rollout_metrics
from algorist.training.objective import deal, rows_to_compute, single_rewards, useful
from algorist.training.order import ProblemOrder, Reserve, Schedule, join_groups, parts_of
from algorist.training.part_size import tokens_that_fit
from algorist.training.step import train_step
from algorist.types import Group, Problem
from algorist_grader.workers import stats

log = logging.getLogger("algorist.training.grpo")

OnRollouts = Callable[[int, list[Group], Tensor], None]
LIMITS = ("timeout", "memory", "crashed")
"""Answers of a rollout batch that the grader could not decide within its limits, by reason: metrics ``grading/…``."""
SEED_STRIDE = 1_000_003
ROUNDING = 1e-3
"""Advantages below it may be rounding, divided by the small number that keeps a deviation from being 0."""


class AlgoristGRPOTrainer(ExactCheckpoints, Trainer):
    """Trains a policy by GRPO.

    Args, beside those of ``make_grpo_trainer``:
        args: transformers' arguments; ``gradient_accumulation_steps`` is 1, a step's parts are made here.
        objective: What a step minimises.
        sampling: How; its ``seed`` advances by one stride per rollout batch.
        extensions: Those that take part.
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
        objective: Objective,
        engine: RolloutEngine,
        sampling: SamplingParams,
        matcher: str = "symbolic",
        extensions: Extensions | None = None,
        on_rollouts: OnRollouts | None = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        self.tokenizer, self.problems, self.prompt_format = tokenizer, list(problems), prompt_format
        self.rewards, self.matcher, self.on_rollouts = rewards, matcher, on_rollouts
        self.objective: Objective = objective
        self.section, self.schedule = section, Schedule.from_section(section)
        self.engine, self.sampling = engine, sampling
        self.reserve = Reserve(self.problems, args.seed)
        self.log_probs = LogProbs(temperature=sampling.temperature)
        self.extensions = extensions or Extensions()
        self.extensions.prepare(model, self)
        self.generation_count = 0
        self.position = 0  # steps done on the present rollout batch
        self.rollouts: Batch | None = None
        self.dealt: list[list[int]] = []
        self.tokens_per_step = 0.0
        self.part_tokens_before: int | None = None
        self.averages = Averages()
        self.graded = stats()
        super().__init__(model=model, args=args, processing_class=tokenizer, callbacks=list(callbacks))
        self.faults = FiniteSteps(self.state_of_step, self.averages.add)
        self.add_callback(self.faults)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model

        def prepare_model(model: Any, *ways: Any, **named: Any) -> Any:
            with nullcontext() if shares_passes(self.accelerator) else without_buckets(model):
                return prepare(model, *ways, **named)

        self.accelerator.prepare_model = prepare_model

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
        """Do one step of the page."""
        model.train()
        return train_step(self, model, inputs)

    @property
    def rank(self) -> int:
        return self.args.process_index

    @property
    def processes(self) -> int:
        return self.args.world_size

    @property
    def group_size(self) -> int:
        return self.schedule.group_size

    def draw(self, number: int, without: set[str]) -> list[Problem]:
        """Return up to ``number`` problems beyond the data loader's; none whose id is in ``without`` or avoided by an extension."""
        return self.reserve.draw(number, without=without | self.extensions.avoid())

    def sample(self, problems: Sequence[Problem]) -> list[Group]:
        """Return the groups of ``problems`` from all processes; every process must call this."""
        share = self.schedule.share(len(problems), self.rank, self.processes)
        own, counts = [problems[place] for place, _ in share], [count for _, count in share]
        first_row = self.rank * len(problems) * self.group_size // self.processes
        groups = self._sampling_of(PolicyEngine(self.engine, self, first_row), self.tokenizer, own, counts)()
        with reminder("for the rollouts of the other processes"):
            return join_groups(self.accelerator, share, groups)

    def sample_elsewhere(self, problems: Sequence[Problem]) -> Callable[[], list[Group]] | None:
        """Give the engine the weights of now; return what samples with them, for any thread. None: no rollout batch comes after this."""
        if self.state.global_step + self.schedule.steps >= self.state.max_steps:
            return None
        tokenizer = copy.deepcopy(self.tokenizer)  # it is one thread's
        engine = self.engine.with_present_weights(tokenizer)  # type: ignore[attr-defined]
        return self._sampling_of(engine, tokenizer, problems, [self.group_size] * len(problems))

    def _sampling_of(
        self, engine: RolloutEngine, tokenizer: Any, problems: Sequence[Problem], counts: Sequence[int]
    ) -> Callable[[], list[Group]]:
        """Return what samples, with the next seed."""
        seed = self.sampling.seed
        if seed is not None:
            seed += SEED_STRIDE * self.generation_count
        self.generation_count += 1
        return partial(
            collect,
            engine,
            tokenizer,
            problems,
            self.prompt_format,
            replace(self.sampling, seed=seed),
            counts,
            rewards=self.rewards,
            matcher=self.matcher,
            extra={"trainer_state": self.state, "log_metric": lambda n, v: self.averages.add({n: v})},
        )

    def useful(self, groups: Sequence[Group]) -> list[bool]:
        """Return which groups carry a signal."""
        return useful(groups, single_rewards(self.objective))

    def share_of(self, groups: Sequence[Group], advantages_PG: Tensor) -> Batch:
        """Return this process's completions of all groups as a batch."""
        first = self.schedule.rows * self.rank
        return Batch.from_groups(
            parts_of(groups, self.schedule, self.rank, self.processes),
            advantages_PG.flatten()[first : first + self.schedule.rows],
            device=self.args.device,
            mask_truncated=self.objective.mask_truncated,
        )

    def begin_rollout_batch(self, batch: Batch) -> None:
        """Deal the completions of a rollout batch to the steps that it feeds."""
        self.dealt = deal(len(batch), self.schedule.shares)
        lengths = self.accelerator.gather(batch.mask.sum(1))  # of all processes, group by group
        self.tokens_per_step = max(1.0, float(lengths.sum() / self.schedule.shares)) / self.processes
        if self.objective.loss.reduction == "prompt-mean-token-mean":
            first = self.schedule.rows * self.rank
            means = mean_lengths(lengths, self.group_size)[first : first + len(batch)]
            batch = replace(batch, mean_lengths=means.expand(batch.mask.shape).contiguous())
        self.rollouts = batch

    def share_of_step(self) -> Batch:
        """Return the completions that this step learns from."""
        assert self.rollouts is not None
        return self.rollouts.take(self.dealt[self.position % self.schedule.shares])

    def end_step(self) -> None:
        """Count the step; the last one of a rollout batch leaves position 0."""
        self.position = (self.position + 1) % self.schedule.steps

    def sampler_is_exact(self, batch: Batch) -> bool:
        """Whether the sampler computed what the trainer would: both in float32, on weights that are the trainer's."""
        weights = next(iter(self.model.parameters())).dtype
        exact = weights == torch.float32 and not self.args.bf16 and not self.args.fp16
        sampler = batch.sampler_log_probs
        known = sampler is not None and not bool(sampler[batch.mask].isnan().any())
        return exact and known and self.sampling.temperature > 0

    @torch.no_grad()
    def log_probs_of(
        self, batch: Batch, *, model: Any = None, entropy: bool = False, of_head: OfHead | None = None
    ) -> Tensor:
        """Return the log-probs (B, T) of a whole batch, part by part; or with ``entropy`` those of the next-token distributions.

        With ``of_head``: what it computes at the head, (B, T, …).
        """
        model = self.model_wrapped if model is None else model
        if isinstance(model, DistributedDataParallel):
            model = model.module
        result: Tensor | None = None
        rows = batch.in_group_order(range(len(batch)))
        for part, idle in self.passes(batch, rows):
            piece = batch.take(part)
            both = self.log_probs(
                model,
                piece,
                compute_entropy=entropy,
                of_head=None if of_head is None else {"of_head": of_head},
                autocast=self.accelerator.autocast,
            )
            values = both[entropy] if of_head is None else piece.extra["of_head"]
            assert values is not None
            if result is None:
                result = values.new_zeros(len(batch), batch.width, *values.shape[2:])
            if not idle:
                result[torch.tensor(part, device=result.device), : values.shape[1]] = values
        assert result is not None
        return result

    def unwrapped(self) -> Any:
        """Return the policy without the loop's wrappers."""
        return self.accelerator.unwrap_model(self.model_wrapped)

    def everyone(self, values: Tensor) -> Tensor:
        """Return the values (N,) of all processes, which are 0 or more."""
        own = self.accelerator.pad_across_processes(values, dim=0, pad_index=-1.0)
        joined = self.accelerator.gather(own)
        return joined[joined >= 0]

    # ---- parts -------------------------------------------------------------------------------------------------

    def inside(self, model: Any) -> tuple[Any, bool]:
        """Return the model that the parts run in, and whether DDP replicates it."""
        replicated = isinstance(model, DistributedDataParallel)
        return (model.module if replicated else model), replicated

    def average_gradients(self, policy: Any) -> None:
        with reminder("for the gradients of the other processes"):
            average_gradients(policy)

    def passes(self, batch: Batch, rows: Sequence[int]) -> Iterator[tuple[list[int], bool]]:
        """Yield the parts of a step as (rows, idle), and let gradients be reduced in the last.

        Idle passes over the shortest completion come where other processes have more parts and each pass needs all of them.
        """
        idle = [min(range(len(batch)), key=lambda row: len(batch.completions[row]))], True
        parts = [(part, False) for part in self._parts(batch, rows)]
        parts += [idle] * (passes_of_all(self.accelerator, len(parts)) - len(parts))
        if torch.is_grad_enabled() and self.shared_passes and not self.shared_passes.order:
            with torch.no_grad():  # the packed pass is compared here, and not in what is noted
                self.log_probs(self.model_wrapped, batch.take(idle[0]), autocast=self.accelerator.autocast)
            parts.insert(0, idle)
        for number, part in enumerate(parts, start=1):
            self.accelerator.sync_gradients = number == len(parts)  # DeepSpeed's engine steps then
            yield part

    @cached_property
    def shared_passes(self) -> SharedPasses | None:
        """Of a model that FSDP2 shards."""
        return SharedPasses.of(self.model_wrapped)

    @cached_property
    def part_tokens(self) -> int | None:
        """Most tokens of one forward and backward; counted at the first, when weights are sharded and the engine has what it keeps.

        A resumed run keeps the size that it had, which decides how sums are rounded, unless less fits now.
        """
        fit = tokens_that_fit(self.model_wrapped, self.section, self.optimizer)
        return min(fit, self.part_tokens_before or fit) if fit else fit

    def _parts(self, batch: Batch, rows: Sequence[int]) -> list[list[int]]:
        return batch.parts(rows, most_rows=self.schedule.micro_batch, most_tokens=self.part_tokens)

    def halve_parts(self, batch: Batch) -> bool:
        """Take what the engine keeps, halve the tokens of a part, or spare memory for a single completion; False: nothing is left."""
        smaller = self._halve_own(batch)
        return smaller if self.shared_passes is None else self.shared_passes.all_smaller(smaller)

    def _halve_own(self, batch: Batch) -> bool:
        if getattr(self.engine, "spare_memory", bool)():
            log.warning("out of memory in the update; the engine keeps nothing between rollouts from now on")
            return True
        rows = rows_to_compute(batch, self.objective, self.extensions)
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

    def log_rollouts(self, sampled: Sampled, advantages_PG: Tensor) -> None:
        """Count and store what the policy of now sampled: groups of an earlier policy are left out, spare ones come last."""
        fresh = [place for place in range(len(sampled.groups)) if place not in sampled.earlier]
        groups = [*(sampled.groups[place] for place in fresh), *sampled.spare]
        self.averages.add(self.extensions.sampled(groups))
        self.averages.add(rollout_metrics(groups, self.rewards.names, sampled.seconds))
        if advantages_PG.shape[1] > 1:
            signal = torch.tensor(self.useful(groups))
            # Without a baseline a group of equal rewards teaches too; with one its advantages are 0 up to rounding.
            signal[: len(fresh)] |= (advantages_PG[fresh].abs().amax(1) > ROUNDING).cpu()
            self.averages.add({"groups/useful_share": float(signal.float().mean())})
        if self.extensions.change_groups:
            useful = self.useful(sampled.groups)
            self.averages.add(
                {
                    "groups/sampled": float(len(groups)),
                    "groups/replayed": float(len(sampled.earlier)),
                    "groups/trained_useful_share": sum(useful) / len(useful),
                    **sampled.metrics,
                }
            )
        self.state.num_input_tokens_seen += sum(
            len(group.prompt_ids) + len(r.completion_ids) for group in groups for r in group.rollouts
        )
        limits = stats()
        self.averages.add({f"grading/{n}": float(limits[n] - self.graded.get(n, 0)) for n in LIMITS})
        self.graded = limits
        if self.on_rollouts is not None and self.accelerator.is_main_process:
            not_trained = advantages_PG.new_full((len(sampled.spare), advantages_PG.shape[1]), math.nan)
            advantages_PG = torch.cat([advantages_PG[fresh], not_trained])
            self.on_rollouts(self.state.global_step, groups, advantages_PG)

    def compare_with_sampler(self, metrics: Metrics, log_probs: Tensor, batch: Batch) -> None:
        """Count |trainer - sampler| of the log-probs on the tokens that were computed right after sampling."""
        if self.position or batch.sampler_log_probs is None or batch.policy_weights is not None:
            return
        gap = (log_probs - batch.sampler_log_probs).abs()
        metrics.add("sampling/sampling_logp_difference/mean", gap, batch.mask)
        metrics.add("sampling/sampling_logp_difference/max", gap, batch.mask)

    def count_skipped(self, metrics: Metrics, batch: Batch, computed: Sequence[int]) -> None:
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
        )
        for name, value in values.items():
            metrics.add(name, value, rest.mask)
        sampling = self.sampling
        filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        if rest.sampler_log_probs is not None and not filtered:  # unbiased without filters
            metrics.add("entropy", -rest.sampler_log_probs, rest.mask)

    def note(self, metrics: Metrics) -> None:
        """Take an extension's metrics of a rollout batch."""
        self.merge(metrics)
        self.averages.add(metrics.values())

    def merge(self, metrics: Metrics) -> None:
        """Add up the metrics of all processes."""
        if self.args.world_size == 1:
            return
        for sums in of_all(metrics.take()):
            for name, (total, count) in sums.items():
                metrics.add_sum(name, total, count)

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
        batch = self.rollouts if self.position else None
        extensions = self.extensions.state_dict()  # which may end what they began
        return {
            **super().extra_state(),
            "generation_count": self.generation_count,
            "position": self.position,
            "rollouts": batch.to("cpu").state_dict() if batch is not None else None,
            "dealt": self.dealt,
            "tokens_per_step": self.tokens_per_step,
            "rewards": self.rewards.state_dict(),
            "reserve": self.reserve.position,
            "part_tokens": vars(self).get("part_tokens", self.part_tokens_before),
            "extensions": extensions,
        }

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self.generation_count, self.position = state["generation_count"], state["position"]
        batch = state["rollouts"]
        self.rollouts = Batch(**batch).to(self.args.device) if batch is not None else None
        self.dealt, self.tokens_per_step = state["dealt"], state["tokens_per_step"]
        self.reserve.position, self.part_tokens_before = state["reserve"], state["part_tokens"]
        self.extensions.load_state_dict(state["extensions"])
        self.rewards.load_state_dict(state["rewards"])
