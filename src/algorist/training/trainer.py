"""The loop of SFT and GRPO: transformers', with ``update`` of ``step.py`` as its step.

One item of the data loader is one optimizer step. The loop, the optimizer, schedules, callbacks and distributed wrappers are
transformers' and accelerate's; ``sft.py`` and ``grpo.py`` say where the completions of a step come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainingArguments

from algorist.config.schema import GRPOSection, SFTSection
from algorist.models.precision import mixed_precision
from algorist.models.sharding import unwrap
from algorist.objectives import Objective
from algorist.training.batch import Batch
from algorist.training.checkpoint import ExactCheckpoints
from algorist.training.distributed import of_all, shares_passes, without_buckets
from algorist.training.extension import Extensions
from algorist.training.faults import FiniteSteps
from algorist.training.log_probs import LogProbs, stop_recomputing
from algorist.training.metrics import Averages, Metrics
from algorist.training.objective import step_weights
from algorist.training.passes import Passes
from algorist.training.training_arguments import bare_optimizer, optim_arguments


class AlgoristTrainer(ExactCheckpoints, Trainer):
    """Trains a policy by a source of batches.

    Args:
        model: The policy, with its adapter if one is trained.
        tokenizer: Its tokenizer.
        section: The recipe's section of the stage.
        objective: What a step minimises.
        log_probs: Computes the policy's log-probs.
        output_dir: Folder of the checkpoints.
        seed: Of data order and sampling.
        device: Of the training.
        extensions: Those that take part.
        spare: Gives back what is kept between steps, when memory runs out.
        callbacks: transformers callbacks.
        report_to: Trackers.
        run_name: Name of the run in trackers.
    """

    objective: Objective

    def __init__(
        self,
        *,
        model: Any,
        tokenizer: Any,
        section: SFTSection | GRPOSection,
        objective: Objective,
        log_probs: LogProbs,
        output_dir: Path,
        seed: int,
        device: torch.device,
        extensions: Extensions | None = None,
        spare: Callable[[], bool] = bool,
        callbacks: Sequence[Any] = (),
        report_to: Sequence[str] = (),
        run_name: str | None = None,
    ) -> None:
        self.tokenizer, self.section, self.objective = tokenizer, section, objective
        self.extensions = extensions or Extensions()
        self.log_probs, self.averages = log_probs, Averages()
        self.passes = Passes(self, log_probs, most_rows=section.batch_size, spare=spare)
        self.tokens_per_step = 0.0
        self.batch: Batch | None = None  # of the step
        self.prepare(model)
        if not section.gradient_checkpointing:  # an earlier stage may have left it on
            stop_recomputing(unwrap(model))
        common = optim_arguments(
            section,
            output_dir=output_dir,
            seed=seed,
            device=device,
            report_to=report_to,
            mixed=mixed_precision(model, device),
        )
        args = TrainingArguments(
            **common,
            run_name=run_name,
            per_device_train_batch_size=section.batch_size * section.gradient_accumulation_steps,
            gradient_accumulation_steps=1,  # a step's parts are made here
            remove_unused_columns=False,
        )
        super().__init__(model=model, args=args, processing_class=tokenizer, callbacks=list(callbacks))
        self.optimizer_cls_and_kwargs = bare_optimizer(model, section)
        self.remove_callback(PrinterCallback)  # the display shows the lines
        self.faults = FiniteSteps(self.state_of_step, self.averages.add)
        self.add_callback(self.faults)

    def prepare(self, model: Any) -> None:
        """Take the policy as it is before the loop has it."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model

        def prepare_model(model: Any, *ways: Any, **named: Any) -> Any:
            with nullcontext() if shares_passes(self.accelerator) else without_buckets(model):
                return prepare(model, *ways, **named)

        self.accelerator.prepare_model = prepare_model

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: transformers' estimate knows neither rollouts nor shared prompts."""
        return 0

    @property
    def rank(self) -> int:
        return self.args.process_index

    @property
    def processes(self) -> int:
        return self.args.world_size

    def unwrapped(self) -> Any:
        """Return the policy without the loop's wrappers."""
        return self.accelerator.unwrap_model(self.model_wrapped)

    # ---- what a step asks for

    def weights_of(self, batch: Batch) -> Tensor:
        """Return the weights (B, T) of a step's tokens on this process."""
        return step_weights(
            batch, self.objective, tokens=self.tokens_per_step, micro_batch=self.section.batch_size
        )

    def count(self, metrics: Metrics, log_probs: Tensor, batch: Batch) -> None:
        """Count the metrics of a micro-batch beyond its loss."""

    def count_skipped(self, metrics: Metrics, batch: Batch, computed: Sequence[int]) -> None:
        """Count the completions that were left out."""

    def add_up(self, metrics: Metrics) -> dict[str, float]:
        """Return the metrics of all processes; every process must call this."""
        if self.processes > 1:
            for sums in of_all(metrics.take()):
                for name, (total, count) in sums.items():
                    metrics.add_sum(name, total, count)
        return metrics.values()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the means since the last line and the tokens so far."""
        means = self.averages.take()
        if "loss" in logs:
            means["num_tokens"] = float(self.state.num_input_tokens_seen)
        super().log({**logs, **means}, start_time)

    def extra_state(self) -> dict[str, Any]:
        return {**super().extra_state(), "passes": self.passes.state_dict()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self.passes.load_state_dict(state["passes"])

    def state_of_step(self) -> dict[str, Any]:
        """Return the completions of the step that was just computed, for a saved batch."""
        assert self.batch is not None
        return self.batch.to("cpu").state_dict()
