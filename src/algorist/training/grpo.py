"""The trainer: TRL's ``GRPOTrainer`` with its own rollouts and a faster update, same losses.

Three seams are replaced and each can be switched off: generation (``engine``), the order and width of micro-batches
and the log-prob pass (``fast_update``), and rows without a learning signal (``skip_zero_advantage``). TRL's
``_compute_loss`` runs unchanged on every path.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from algorist.training import trl_seam  # isort: skip  (sets TRL's telemetry switch before TRL is imported)

import torch
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from algorist.errors import ConfigError
from algorist.rollouts.base import RolloutEngine, SamplingParams
from algorist.training.batches import regroup, trim
from algorist.training.checkpoint import ExactCheckpoints
from algorist.training.faults import FaultTolerant
from algorist.training.processes import gather_generation, rank_draws, whole_weights
from algorist.training.sampling_step import (
    GenerationBatch,
    Record,
    completion_text,
    rollout_metrics,
    rollout_records,
    sample_rows,
)
from algorist.training.update import FastUpdate

log = logging.getLogger(__name__)

EngineOrFactory = RolloutEngine | Callable[[torch.nn.Module], RolloutEngine]
_SEED_STRIDE = 1_000_003


class AlgoristGRPOTrainer(ExactCheckpoints, FaultTolerant, GRPOTrainer):
    """GRPO with shared-prefill rollouts and a shared-prefix update.

    Args:
        *args: As for ``trl.GRPOTrainer``.
        engine: A rollout engine, or a function that makes one from the unwrapped policy (called at the first
            generation); None generates with TRL's own path.
        sampling: Sampling settings of the engine; made from the GRPO config when left out. Its temperature and
            ``max_new_tokens`` must equal the config's, because the loss uses them too. A ``seed`` is advanced by one
            stride per generation batch.
        fast_update: Compute each prompt once per group and the head at completion positions only. What the model or
            the settings do not allow falls back to TRL's pass, with one line in the log.
        skip_zero_advantage: Leave out rows whose advantage is zero, where that changes nothing but the time.
        sampler_log_probs: Take old log-probs from the sampler where they are exact (float32 rollouts and training).
        micro_batch_tokens: Tokens (prompt once per group, plus completions) of one forward and backward inside a
            micro-batch; larger micro-batches are recomputed in parts to bound memory. None means no bound.
        on_rollouts: Called once per generation batch with one dictionary per completion.
        **kwargs: As for ``trl.GRPOTrainer``.

    Raises:
        ConfigError: ``sampling`` contradicts the GRPO config.
        MissingExtraError: The installed TRL was not tested.
    """

    args: GRPOConfig
    model: Any

    def __init__(
        self,
        *args: Any,
        engine: EngineOrFactory | None = None,
        sampling: SamplingParams | None = None,
        fast_update: bool = True,
        skip_zero_advantage: bool = True,
        sampler_log_probs: bool = True,
        micro_batch_tokens: int | None = None,
        on_rollouts: Callable[[list[Record]], None] | None = None,
        **kwargs: Any,
    ) -> None:
        trl_seam.check_trl_version()
        with trl_seam.reference_is_the_policy(kwargs.get("model", args[0] if args else None)):
            super().__init__(*args, **kwargs)
        self.fast_update = fast_update
        self.skip_zero_advantage = skip_zero_advantage
        self.sampler_log_probs = sampler_log_probs
        self.on_rollouts = on_rollouts
        self.sampling = sampling if sampling is not None else self._sampling_from_config()
        self.generation_count = 0
        self._engine_source = engine
        self._engine: RolloutEngine | None = None
        if engine is not None:
            self._check_sampling()
        self._update = FastUpdate(
            temperature=self.temperature,
            micro_batch_tokens=micro_batch_tokens,
            cast_head_to_fp32=bool(self.args.cast_lm_head_to_fp32),
        )
        self._batch = GenerationBatch()
        self._regrouped: Any = None
        self._keep_rows: torch.Tensor | None = None
        self._fill: dict[str, torch.Tensor | None] = {}
        self._scoring = self._old_wanted = self._nothing_to_compute = False
        self._generated_at_step = -1
        self._again = self._generating = False
        self._rollout_seconds = 0.0
        self._update_seconds = 0.0

    # ---- generation -------------------------------------------------------------------------------------------

    @property
    def engine(self) -> RolloutEngine | None:
        """The rollout engine, made at the first use; None when TRL generates."""
        if self._engine is None and self._engine_source is not None:
            source = self._engine_source
            if hasattr(source, "generate") and not isinstance(source, type):
                self._engine = cast(RolloutEngine, source)
            else:
                self._engine = cast(Callable[[torch.nn.Module], RolloutEngine], source)(self._policy())
        return self._engine

    def _policy(self) -> torch.nn.Module:
        return self.accelerator.unwrap_model(self.model_wrapped, keep_fp32_wrapper=True)

    def _sampling_from_config(self) -> SamplingParams:
        args = self.args
        return SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k or 0,
            min_p=args.min_p or 0.0,
            max_new_tokens=args.max_completion_length or 256,
            stop_token_ids=tuple(int(i) for i in self.eos_token_ids),
        )

    def _check_sampling(self) -> None:
        for ours, theirs, why in (
            ("temperature", "temperature", "the loss divides logits by it"),
            ("max_new_tokens", "max_completion_length", "dr_grpo divides by it"),
        ):
            found, expected = getattr(self.sampling, ours), getattr(self.args, theirs)
            if found != expected:
                raise ConfigError(
                    f"sampling.{ours} is {found} but the GRPO config's {theirs} is {expected} ({why}); "
                    f"set both to the same value"
                )
        if self.repetition_penalty != 1.0:
            raise ConfigError(
                f"repetition_penalty is {self.repetition_penalty}, which no rollout engine applies; "
                "set it to 1.0 or leave engine=None"
            )
        if self.sampling.stop_strings and self.args.mask_truncated_completions:
            raise ConfigError(
                "mask_truncated_completions counts a completion ended by a stop string as truncated; "
                "set mask_truncated_completions=False or use stop_token_ids instead of stop_strings"
            )
        if not self.sampling.stop_token_ids:
            self.sampling = replace(self.sampling, stop_token_ids=tuple(int(i) for i in self.eos_token_ids))

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Sample one completion per (repeated) prompt; TRL's own generation when no engine is set."""
        started = time.perf_counter()
        self._batch = GenerationBatch(prompt_ids=prompt_ids)
        if self.engine is None or images is not None or self.use_vllm:
            completion_ids, log_probs = super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images
            )
            stops = {*self.eos_token_ids, self._tokenizer.pad_token_id}
            self._batch.truncated = [not ids or ids[-1] not in stops for ids in completion_ids]
        else:
            params, policy = self.sampling, self._policy()
            if params.seed is not None:
                params = replace(params, seed=params.seed + _SEED_STRIDE * self.generation_count)
            drawing = rank_draws(self.accelerator, params, len(prompt_ids))
            with _eval_mode(policy), torch.no_grad(), whole_weights(policy), drawing as drawn:
                completions = sample_rows(self.engine, prompt_ids, drawn)
            completion_ids = [completion.token_ids for completion in completions]
            log_probs = [completion.log_probs for completion in completions]
            self._batch.truncated = [completion.finish_reason == "length" for completion in completions]
            self._batch.sampler_log_probs = log_probs
        self.generation_count += 1
        self._batch.completion_ids = completion_ids
        self._batch.seconds = time.perf_counter() - started
        return completion_ids, log_probs

    def _calculate_rewards(
        self, inputs: list[Any], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> torch.Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        start = self.accelerator.process_index * len(prompts)
        self._batch.rewards_RK = rewards[start : start + len(prompts)].detach().cpu()
        self._batch.completion_texts = [completion_text(completion) for completion in completions]
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's scoring; then the records go to ``on_rollouts`` and the rollout metrics to the log."""
        started = time.perf_counter()
        mode = "train" if self.model.training else "eval"
        # TRL asks for old log-probs first, then for the reference's.
        self._scoring = self._generating = True
        self._old_wanted = trl_seam.expects_old_log_probs(self.args, self.num_iterations)
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self._scoring = self._generating = False
        if mode == "train":
            self._generated_at_step = self.state.global_step
        names = list(self.reward_func_names)
        group_size = self.num_generations if mode == "train" else self.num_generations_eval
        batch, rows, advantages = gather_generation(self.accelerator, self._batch, inputs, output)
        metrics = rollout_metrics(
            batch, group_size=group_size or 1, reward_names=names, reward_weights=self.reward_weights
        )
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)
        if self.on_rollouts is not None and mode == "train" and self.accelerator.is_main_process:
            self.on_rollouts(
                rollout_records(
                    batch,
                    rows,
                    advantages,
                    step=self.state.global_step,
                    reward_names=names,
                    reward_weights=self.reward_weights,
                    decode=self._tokenizer.decode,
                )
            )
        self._rollout_seconds += time.perf_counter() - started
        return output

    # ---- batches ----------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's buffering; new buffers are regrouped inside each accumulation window and trimmed."""
        if self._again and self._buffered_inputs is not None:  # out of memory: the same batches once more
            return self._buffered_inputs[self._step % self.args.steps_per_generation]
        inputs = super()._prepare_inputs(generation_batch)
        buffered = self._buffered_inputs
        if not self.model.training or buffered is None or buffered is self._regrouped or not self.fast_update:
            return inputs
        if any(key in buffered[0] for key in trl_seam.MULTIMODAL_TENSORS):
            return inputs
        window = trl_seam.accumulation_window(self.args)
        if window is not None and window > 1 and self._row_order_is_free():
            buffered = regroup(buffered, window)
        self._buffered_inputs = self._regrouped = [trim(batch) for batch in buffered]
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _row_order_is_free(self) -> bool:
        return (
            self.loss_type in trl_seam.ROW_ORDER_FREE_LOSSES
            and self.top_entropy_quantile >= 1.0
            and not self._entropy_bonus_enabled
            and not self.aux_loss_enabled
        )

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        found = super()._get_train_sampler(dataset)
        if type(found) is RepeatSampler:
            found.__class__ = trl_seam.EpochSampler
        return found

    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint keeps beyond TRL's own state: buffered micro-batches, position, seed counter, reward states."""
        used_again = self._step % ((self.args.steps_per_generation or 1) * self.num_iterations) != 0
        states = {
            index: function.state_dict()
            for index, function in enumerate(self.reward_funcs)
            if hasattr(function, "state_dict") and not isinstance(function, torch.nn.Module)
        }
        return {
            **super().extra_state(),
            "step": self._step,
            "generation_count": self.generation_count,
            "generated_at_step": self._generated_at_step,
            "buffered_inputs": self._buffered_inputs if used_again else None,
            "rewards": states,
        }

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what ``extra_state`` returned."""
        super().load_extra_state(state)
        self._step = state["step"]
        self.generation_count = state["generation_count"]
        self._generated_at_step = state["generated_at_step"]
        device = self.accelerator.device
        buffered = state["buffered_inputs"]
        if buffered is not None:
            buffered = [
                {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
                for batch in buffered
            ]
        self._buffered_inputs = self._regrouped = buffered
        for index, kept in state["rewards"].items():
            self.reward_funcs[index].load_state_dict(kept)

    # ---- update -----------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """TRL's step; logs the seconds of the update without those of the rollouts."""
        self._rollout_seconds = 0.0
        self._again = False
        started = time.perf_counter()
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._update_seconds += time.perf_counter() - started - self._rollout_seconds
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._metrics["train"]["update/seconds"].append(self._update_seconds)
            self._update_seconds = 0.0
        return loss

    def can_halve(self) -> bool:
        """Halve the tokens of one forward and backward, if the fast pass runs and has more than one row."""
        # A window over several generations cannot be computed again: the buffer holds the last one.
        whole = (self.args.steps_per_generation or 1) >= self.current_gradient_accumulation_steps
        self._again = True
        return whole and self.fast_update and self._update.halve()

    def rewind(self, count: int) -> None:
        """Go back ``count`` micro-batches in the buffer."""
        self._step -= count

    def used_inputs(self) -> list[Any]:
        """Return the buffered micro-batches of the window that just ended."""
        buffered: list[Any] = self._buffered_inputs or []
        return [buffered[(self._step - k - 1) % len(buffered)] for k in range(len(self._window))][::-1]

    def in_update(self) -> bool:
        """Sampling has a memory plan of its own."""
        return not self._generating

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if self._marks is None:
            self.mark()
        self._keep_rows = self._rows_with_signal(inputs)
        self._fill = {name: inputs.get(name) for name in ("old_per_token_logps", "sampling_per_token_logps")}
        mask = inputs["completion_mask"]
        self._nothing_to_compute = not bool(
            (mask if self._keep_rows is None else mask[self._keep_rows]).any()
        )
        if self._nothing_to_compute and self.fast_update and self.model.training:
            # A window without any signal still takes an optimizer step in TRL, with zero gradients.
            for parameter in self.model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._keep_rows, self._fill, self._nothing_to_compute = None, {}, False

    def _rows_with_signal(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """Return which rows (B,) need a forward pass, or None for all of them."""
        exact = (
            self.skip_zero_advantage
            and self.fast_update
            and self.model.training
            and torch.is_grad_enabled()
            and self.beta == 0.0
            and self.loss_type in trl_seam.ZERO_ADVANTAGE_FREE_LOSSES
            and self.top_entropy_quantile >= 1.0
            and not self._entropy_bonus_enabled
            and not self.aux_loss_enabled
        )
        if not exact:
            return None
        keep = inputs["advantages"] != 0
        keep = keep if keep.dim() == 1 else keep.any(1)
        if not keep.any() and self.accelerator.num_processes > 1:
            keep = keep.clone()  # every rank must take part in the gradient reduction
            keep[inputs["completion_mask"].sum(1).argmin()] = True
        return keep

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Log-probs (B, T) and entropies (B, T) by the fast pass, from the sampler, or by TRL's own pass."""
        mask = attention_mask[:, -logits_to_keep:]
        if self._scoring and not compute_entropy:
            stored = self._take_sampler_log_probs(model, mask)
            if stored is not None:
                return stored, None, None
        # With several processes TRL's pass gives every parameter its zero gradient, for which DDP waits.
        alone = self.accelerator.num_processes == 1 or not self._nothing_to_compute
        if (
            self.fast_update
            and alone
            and not compute_aux_loss
            and all(value is None for value in multimodal.values())
        ):
            keep = self._keep_rows
            found = self._update.log_probs(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                compute_entropy=compute_entropy,
                keep_rows=keep,
                autocast=self.accelerator.autocast,
            )
            if found is not None:
                log_probs, entropy = found
                if keep is not None and not bool(keep.all()):
                    log_probs, entropy = self._fill_skipped(log_probs, entropy, keep, mask)
                self._log_sampler_gap(log_probs, mask, keep)
                return log_probs, entropy, None
        found_stock = super()._get_per_token_logps_and_entropies(
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=batch_size,
            compute_entropy=compute_entropy,
            compute_aux_loss=compute_aux_loss,
            **multimodal,
        )
        self._log_sampler_gap(found_stock[0], mask, None)
        return found_stock

    def _take_sampler_log_probs(self, model: Any, mask: torch.Tensor) -> torch.Tensor | None:
        """Return the sampler's log-probs (B, T) in place of TRL's pass for old log-probs, once, where exact."""
        wanted, self._old_wanted = self._old_wanted, False
        if not wanted or model is not self.model or not self.sampler_log_probs:
            return None
        rows = self._batch.sampler_log_probs
        parameters = next(iter(self._policy().parameters()))
        exact = parameters.dtype == torch.float32 and not self.args.bf16 and not self.args.fp16
        if rows is None or not exact or self.sampling.temperature == 0:
            return None
        result = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        for row, values in enumerate(rows):
            result[row, : len(values)] = torch.tensor(values, dtype=torch.float32)
        return result * mask

    def _fill_skipped(
        self, log_probs: torch.Tensor, entropy: torch.Tensor | None, keep: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Give skipped rows a ratio of exactly 1 and, for the logged mean, an estimate of their entropy.

        The estimate is minus the sampled tokens' log-prob (unbiased without top-k, top-p and min-p), otherwise the
        mean of the computed rows; without any of them it is NaN, which TRL leaves out of the logged mean.
        """
        skipped = ~keep
        old, sampler = self._fill.get("old_per_token_logps"), self._fill.get("sampling_per_token_logps")
        if old is not None:
            rows = torch.where(skipped[:, None], old, torch.zeros_like(old)).to(log_probs.dtype)
            log_probs = log_probs + rows
        if entropy is not None:
            filtered = self.sampling.top_k > 0 or self.sampling.top_p < 1 or self.sampling.min_p > 0
            source = None if filtered else sampler if sampler is not None else old
            if source is None:  # NaN when no row was computed
                used = mask * keep[:, None]
                estimate = ((entropy * used).sum() / used.sum()).detach().expand_as(entropy)
            else:
                estimate = -source.to(entropy.dtype) * mask
            entropy = torch.where(skipped[:, None], estimate, entropy.detach())
        return log_probs, entropy

    def _log_sampler_gap(
        self, log_probs: torch.Tensor, mask: torch.Tensor, keep: torch.Tensor | None
    ) -> None:
        """Log |training − sampler log-prob| over the tokens of the first pass after a generation."""
        sampler = self._fill.get("sampling_per_token_logps")
        if sampler is None or self._generated_at_step != self.state.global_step or not self.model.training:
            return
        used = mask.bool() if keep is None else mask.bool() & keep[:, None]
        gap = (log_probs.detach() - sampler).abs()[used]
        gap = gap[~gap.isnan()]
        if gap.numel():
            self._metrics["train"]["log_probs/sampler_gap_mean"].append(gap.mean().item())
            self._metrics["train"]["log_probs/sampler_gap_max"].append(gap.max().item())


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch dropout off and restore each module's mode afterwards (TRL reads it to tell train from eval)."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
