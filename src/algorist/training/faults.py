"""What goes wrong inside a step and need not end the run: gradients that are not finite, memory that runs out.

A step whose gradient is not finite changes nothing: weights, moments and counters of the optimizer stay, the batch is
saved, the step is counted. After several in a row the run stops. A micro-batch that does not fit is computed in halves
with the same mathematics; the steps after it keep the smaller size.
"""

from __future__ import annotations

import gc
import logging
import math
from pathlib import Path
from typing import Any

import torch

from algorist.errors import TrainingError, is_out_of_memory

log = logging.getLogger("algorist.training.faults")

MAX_BAD_STEPS = 5
"""So many steps in a row without a finite gradient end the run: the weights or the data are broken, not one batch."""


class FaultTolerant:
    """Mixin for Hugging Face trainers; see the module. With several processes running out of memory ends the run."""

    args: Any
    state: Any
    accelerator: Any
    model: Any
    _metrics: Any
    _total_train_tokens: int
    bad_steps = 0
    bad_steps_in_a_row = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._window: list[Any] = []
        self._window_ended = False
        self._marks: tuple[dict[str, int], int] | None = None
        super().__init__(*args, **kwargs)

    # ---- hooks ------------------------------------------------------------------------------------------------

    def can_halve(self) -> bool:
        """Make the next attempt smaller; return False when that is not possible."""
        return False

    def rewind(self, count: int) -> None:
        """Undo the counting of ``count`` micro-batches, which are then computed again."""

    def used_inputs(self) -> list[Any]:
        """Return the inputs of the accumulation window that just ended, for a saved batch."""
        return list(self._window)

    def mark(self) -> None:
        """Remember where the metrics stand before the window's first loss."""
        lengths = {name: len(values) for name, values in self._metrics["train"].items()}
        self._marks = lengths, self._total_train_tokens

    def in_update(self) -> bool:
        """Return whether running out of memory now is the update's doing (and not that of sampling)."""
        return True

    # ---- memory -----------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One micro-batch; when memory runs out, the whole accumulation window again with smaller parts."""
        if self._window_ended:
            self._window, self._window_ended, self._marks = [], False, None
        self._window.append(inputs)
        todo, done = [inputs], len(self._window) - 1
        while True:
            try:
                for batch in todo:
                    loss: torch.Tensor = super().training_step(model, batch, num_items_in_batch)  # type: ignore[misc]
                    done += 1
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not self.in_update():
                    raise
                if self.accelerator.num_processes > 1 or not self.can_halve():
                    raise TrainingError(_out_of_memory(self.args, error)) from error
            # Here and not in the handler, whose traceback keeps the failed pass's tensors alive.
            # The failed backward may have added a part of its gradients: the window starts over.
            model.zero_grad(set_to_none=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.rewind(done)
            if self._marks is not None:
                lengths, self._total_train_tokens = self._marks
                for name, values in self._metrics["train"].items():
                    del values[lengths.get(name, 0) :]
            todo, done = list(self._window), 0
        self._window_ended = self.accelerator.sync_gradients
        return loss

    # ---- numbers ----------------------------------------------------------------------------------------------

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        if norm is None or self.accelerator.scaler is not None or math.isfinite(float(norm)):
            self.bad_steps_in_a_row = 0  # a scaler (fp16) skips such steps itself
            return norm
        self._skip_step(model, float(norm))
        return norm

    def _skip_step(self, model: Any, norm: float) -> None:
        for parameter in model.parameters():
            parameter.grad = None  # an optimizer leaves such parameters and their moments alone
        step = self.state.global_step
        self.bad_steps += 1
        self.bad_steps_in_a_row += 1
        self._metrics["train"]["update/skipped"].append(1.0)
        where = Path(self.args.output_dir) / f"bad-step-{step}.pt"
        if self.bad_steps_in_a_row <= MAX_BAD_STEPS and self.args.should_save:
            where.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"step": step, "grad_norm": norm, "inputs": self.used_inputs()}, where)
        log.warning(
            "step %d: the gradient is not finite (norm %s); the step is skipped, its batch is in %s",
            step,
            norm,
            where,
        )
        if self.bad_steps_in_a_row >= MAX_BAD_STEPS:
            rate = self.args.learning_rate
            raise TrainingError(
                f"{MAX_BAD_STEPS} steps in a row had a gradient that is not finite (the last one is step {step}; its batch "
                f"is in {where}). Usual causes: a learning rate that is too high (it is {rate:g}; take {rate / 10:g}), "
                "weights that are not finite already, or float16 (take model.dtype=bfloat16). The newest checkpoint is "
                "from before these steps or as good as them: they changed nothing"
            )


def _out_of_memory(args: Any, error: BaseException) -> str:
    smaller = max(1, args.per_device_train_batch_size // 2)
    return (
        f"out of memory in the update, also with one row at a time: {str(error).splitlines()[0]}. "
        f"Take a smaller batch_size ({smaller} instead of {args.per_device_train_batch_size}; raise "
        "gradient_accumulation_steps by the same factor), gradient_checkpointing=true, model.lora, or shorter completions"
    )
