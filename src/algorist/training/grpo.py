"""GRPO as a source of batches: groups of all processes are sampled, and their completions dealt to the steps that they feed.

One item of the data loader is one optimizer step; the first step of a rollout batch collects it. ``step.py`` is the step,
``trainer.py`` the loop.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from algorist.config.schema import GRPOSection
from algorist.models.modes import eval_mode
from algorist.objectives import mean_lengths, token_losses
from algorist.rollouts.base import RolloutEngine, SamplingParams
from algorist.rollouts.collect import collect
from algorist.training.batch import Batch
from algorist.training.distributed import PolicyEngine, of_all, reminder
from algorist.training.extension import Event, Sampled
from algorist.training.lm_head import OfHead
from algorist.training.log_probs import LogProbs
from algorist.training.metrics import Metrics, rollout_metrics
from algorist.training.objective import deal, single_rewards, useful
from algorist.training.order import ProblemOrder, Reserve, Schedule, join_groups, parts_of
from algorist.training.step import train_step
from algorist.training.trainer import AlgoristTrainer
from algorist.types import Group, Problem
from algorist_grader.workers import stats

if TYPE_CHECKING:
    from algorist.prompts import PromptFormat
    from algorist.rewards import RewardSet

OnRollouts = Callable[[int, list[Group], Tensor], None]
LIMITS = ("timeout", "memory", "crashed")
"""Answers of a rollout batch that the grader could not decide within its limits, by reason: metrics ``grading/…``."""
SEED_STRIDE = 1_000_003
ROUNDING = 1e-3
"""Advantages below it may be rounding, divided by the small number that keeps a deviation from being 0."""


class AlgoristGRPOTrainer(AlgoristTrainer):
    """Trains a policy by GRPO.

    Args, beside those of ``make_grpo_trainer`` and ``AlgoristTrainer``:
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
        engine: RolloutEngine,
        sampling: SamplingParams,
        seed: int,
        matcher: str = "symbolic",
        on_rollouts: OnRollouts | None = None,
        **loop: Any,
    ) -> None:
        self.problems, self.prompt_format = list(problems), prompt_format
        self.rewards, self.matcher, self.on_rollouts = rewards, matcher, on_rollouts
        self.schedule = Schedule.from_section(section)
        self.engine, self.sampling = engine, sampling
        self.reserve = Reserve(self.problems, seed)
        self.resting: set[str] = set()
        self.generation_count = 0
        self.position = 0  # steps done on the present rollout batch
        self.rollouts: Batch | None = None
        self.dealt: list[list[int]] = []
        self.graded, self.failed = stats(), rewards.failures
        super().__init__(
            model=model,
            tokenizer=tokenizer,
            section=section,
            log_probs=LogProbs(temperature=sampling.temperature),
            spare=lambda: getattr(self.engine, "spare_memory", bool)(),
            seed=seed,
            **loop,
        )

    def prepare(self, model: Any) -> None:
        for extension in self.extensions:
            extension.prepare(model, self)

    # ---- data --------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader whose items are the problems of a rollout batch, once for each step that it feeds."""
        return ProblemOrder.loader(
            self.problems, self.schedule.problems(self.args.world_size), self.schedule.steps, self.args.seed
        )

    # ---- one step ----------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Do one step of the page."""
        model.train()
        return train_step(self, model, inputs)

    @property
    def group_size(self) -> int:
        return self.schedule.group_size

    @property
    def steps_per_rollouts(self) -> int:
        return self.schedule.steps

    def rows_of(self, places: Sequence[int]) -> list[int]:
        return self.schedule.rows_of(places, self.rank)

    def draw(self, number: int, without: set[str]) -> list[Problem]:
        """Return up to ``number`` problems beyond the data loader's; none whose id is in ``without`` or ``resting``."""
        return self.reserve.draw(number, without=without | self.resting)

    def sample(self, problems: Sequence[Problem]) -> list[Group]:
        """Return the groups of ``problems`` from all processes; every process must call this."""
        share = self.schedule.share(len(problems), self.rank, self.processes)
        own, counts = [problems[place] for place, _ in share], [count for _, count in share]
        first_row = self.rank * len(problems) * self.group_size // self.processes
        groups = self._sampling_of(PolicyEngine(self.engine, self, first_row), self.tokenizer, own, counts)()
        with reminder("for the rollouts of the other processes"):
            return join_groups(share, groups)

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
        """Return a function that samples with the next seed."""
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
        """Mark the groups that carry a signal."""
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
        self.batch = self.rollouts.take(self.dealt[self.position % self.schedule.shares])
        return self.batch

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

        With ``of_head``: what it computes at the head, (B, T, …). An adapter's dropout is off, as it is where the policy samples.
        """
        model = self.model_wrapped if model is None else model
        if isinstance(model, DistributedDataParallel):
            model = model.module
        result: Tensor | None = None
        rows = batch.in_group_order(range(len(batch)))
        for part, idle in self.passes.parts(batch, rows):
            piece = batch.take(part)
            named = of_head and {"of_head": of_head}
            with eval_mode(model, nn.Dropout):
                both = self.passes.log_probs(model, piece, compute_entropy=entropy, of_head=named)
            values = both[entropy] if of_head is None else piece.extra["of_head"]
            assert values is not None
            if result is None:
                result = values.new_zeros(len(batch), batch.width, *values.shape[2:])
            if not idle:
                result[torch.tensor(part, device=result.device), : values.shape[1]] = values
        assert result is not None
        return result

    def everyone(self, values: Tensor) -> Tensor:
        """Return the values (N,) of all processes, which are 0 or more."""
        own = self.accelerator.pad_across_processes(values, dim=0, pad_index=-1.0)
        joined = self.accelerator.gather(own)
        return joined[joined >= 0]

    # ---- log ---------------------------------------------------------------------------------------------------

    def log_rollouts(self, sampled: Sampled, advantages_PG: Tensor) -> None:
        """Count and store what the policy of now sampled: groups of an earlier policy are left out, spare ones come last."""
        fresh = [place for place in range(len(sampled.groups)) if place not in sampled.earlier]
        groups = [*(sampled.groups[place] for place in fresh), *sampled.spare]
        self.averages.add({**self.extensions.seen(Event("sampled", "grpo", groups=groups)).metrics})
        self.averages.add(rollout_metrics(groups, self.rewards.names, sampled.seconds))
        if advantages_PG.shape[1] > 1:
            signal = torch.tensor(self.useful(groups))
            # Without a baseline a group of equal rewards teaches too; with one its advantages are 0 up to rounding.
            signal[: len(fresh)] |= (advantages_PG[fresh].abs().amax(1) > ROUNDING).cpu()
            self.averages.add({"groups/useful_share": float(signal.float().mean())})
        if self.extensions.change_groups:
            useful = self.useful(sampled.groups)
            self.averages.add({"groups/trained_useful_share": sum(useful) / len(useful), **sampled.metrics})
            self.averages.add({"groups/sampled": len(groups), "groups/replayed": len(sampled.earlier)})
        self.state.num_input_tokens_seen += sum(
            len(group.prompt_ids) + len(r.completion_ids) for group in groups for r in group.rollouts
        )
        self.add_up_failures()
        if self.on_rollouts is not None and self.accelerator.is_main_process:
            not_trained = advantages_PG.new_full((len(sampled.spare), advantages_PG.shape[1]), math.nan)
            advantages_PG = torch.cat([advantages_PG[fresh], not_trained])
            self.on_rollouts(self.state.global_step, groups, advantages_PG)

    def add_up_failures(self) -> None:
        """Count the failures of all processes' graders and rewards since the last rollout batch; every process must call this."""
        limits = stats()
        undecided = [limits[name] - self.graded[name] for name in LIMITS]
        failed = [(r.failures - self.failed.get(r.name, 0), r.first_failure) for r in self.rewards]
        of_graders, of_rewards = zip(*of_all((undecided, failed)))
        self.averages.add({f"grading/{name}": sum(n) for name, *n in zip(LIMITS, *of_graders)})
        for reward, *tallies in zip(self.rewards, *of_rewards):
            reward.failures = self.failed.get(reward.name, 0) + sum(number for number, _ in tallies)
            reward.first_failure = next((first for _, first in tallies if first), "")
        self.graded, self.failed = limits, self.rewards.failures

    def count(self, metrics: Metrics, log_probs: Tensor, batch: Batch) -> None:
        """Count |trainer - sampler| of the log-probs on the tokens that were computed right after sampling."""
        if self.position or batch.sampler_log_probs is None or batch.policy_weights is not None:
            return
        gap = (log_probs - batch.sampler_log_probs).abs()
        metrics.add("sampling/sampling_logp_difference/mean", gap, batch.mask)
        metrics.add("sampling/sampling_logp_difference/max", gap, batch.mask)

    def count_skipped(self, metrics: Metrics, batch: Batch, computed: Sequence[int]) -> None:
        """Count the completions that were left out: ratio 1, and as entropy what their own log-probs estimate."""
        metrics.add_sum("update/computed_share", len(computed), len(batch))
        left = sorted(set(range(len(batch))) - set(computed))
        if not left:
            return
        rest = batch.take(left)
        zero = torch.zeros_like(rest.advantages)
        _, values = token_losses(zero, rest.advantages, rest.mask, loss=self.objective.loss)
        for name, value in values.items():
            metrics.add(name, value, rest.mask)
        sampling = self.sampling
        filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        if rest.sampler_log_probs is not None and not filtered:  # unbiased without filters
            metrics.add("entropy", -rest.sampler_log_probs, rest.mask)

    def note(self, metrics: Metrics) -> None:
        """Take an extension's metrics of a rollout batch."""
        self.averages.add(self.add_up(metrics))

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Any]:
        """Return the state beyond transformers' own: the rollout batch in use, position, counters."""
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
            "extensions": extensions,
        }

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self.generation_count, self.position = state["generation_count"], state["position"]
        batch = state["rollouts"]
        self.rollouts = Batch(**batch).to(self.args.device) if batch is not None else None
        self.dealt, self.tokens_per_step = state["dealt"], state["tokens_per_step"]
        self.reserve.position = state["reserve"]
        self.extensions.load_state_dict(state["extensions"])
        self.rewards.load_state_dict(state["rewards"])
