"""What goes wrong inside a step and need not end the run: gradients that are not finite, memory that runs out.

A step whose gradient is not finite changes nothing: weights, moments and counters of the optimizer stay, the batch is
saved, the step is counted. After several in a row the run stops. A micro-batch that does not fit is computed in halves
with the same mathematics; the steps after it keep the smaller size.
"""

from __future__ import annotations

import gc
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from algorist.errors import TrainingError, is_out_of_memory
from algorist.rollouts.vllm import VLLMRollouts

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
                    raise TrainingError(out_of_memory_text(load_of(self), error)) from error
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


@dataclass(frozen=True, slots=True)
class Load:
    """What decides how much memory an update takes, by the recipe's names. ``vllm_share`` None: vLLM takes none here."""

    stage: str
    batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool = False
    group_size: int | None = None
    steps_per_generation: int | None = None
    max_completion_tokens: int | None = None
    vllm_share: float | None = None
    processes: int = 1
    cuda: bool = False


def memory_advice(load: Load) -> list[str]:
    """Return what makes an update smaller, in the order to try; each value is one that the recipe takes.

    Batch and accumulation change by one factor, so that a step holds what it held; the group still divides the step.
    """
    told = [] if load.gradient_checkpointing else [f"{load.stage}.gradient_checkpointing=true"]
    smaller = smaller_batch(load)
    if smaller:
        changed = " ".join(f"{load.stage}.{name}={value}" for name, value in smaller.items())
        told.append(
            f"{changed} (instead of {load.batch_size} and {load.gradient_accumulation_steps}: the same step in smaller parts)"
        )
    group = _smaller_group(load)
    if group is not None:
        told.append(f"{load.stage}.group_size={group} (instead of {load.group_size})")
    if load.max_completion_tokens and load.max_completion_tokens > 1:
        half = load.max_completion_tokens // 2
        told.append(f"{load.stage}.max_completion_tokens={half} (instead of {load.max_completion_tokens})")
    if load.vllm_share is not None:
        share = round(max(0.1, load.vllm_share - 0.2), 2)
        if share < load.vllm_share:
            told.append(
                f"{load.stage}.vllm.gpu_memory_utilization={share:g} (instead of {load.vllm_share:g}; the rest is the update's)"
            )
    told.append("a smaller model (model.name), or an adapter (model.lora.rank=16)")
    if load.cuda:
        told.append("several GPUs with DeepSpeed ZeRO (algorist launch --config zero3 RECIPE)")
        told.append(
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment, against fragmentation"
        )
    return told


def smaller_batch(load: Any) -> dict[str, int]:
    """Return the settings of the next smaller micro-batch (half, where it is even) with the same step; none at one row.

    Args:
        load: A ``Load``, or a recipe's ``sft`` or ``grpo`` section.
    """
    rows = load.batch_size
    part = next((d for d in range(rows // 2, 0, -1) if rows % d == 0), None)
    if part is None:
        return {}
    factor = rows // part
    changed = {
        "batch_size": part,
        "gradient_accumulation_steps": load.gradient_accumulation_steps * factor,
    }
    generation = getattr(load, "steps_per_generation", None)
    return changed if generation is None else changed | {"steps_per_generation": generation * factor}


def _smaller_group(load: Load) -> int | None:
    """Return the group size nearest to half of the present one that the batches still hold whole, or None."""
    if load.group_size is None:
        return None
    step = load.batch_size * load.gradient_accumulation_steps
    sampled = load.batch_size * (load.steps_per_generation or load.gradient_accumulation_steps)
    fits = [g for g in range(2, load.group_size) if step % g == 0 and sampled % g == 0]
    return min(fits, key=lambda g: abs(g - load.group_size / 2), default=None)  # type: ignore[operator]


def load_of(trainer: Any) -> Load:
    """Return the load of a Hugging Face trainer of SFT or GRPO."""
    args = trainer.args
    grpo = hasattr(args, "num_generations")
    share = None
    if grpo and getattr(args, "vllm_mode", "") != "server":
        beside = isinstance(getattr(trainer, "_engine", None), VLLMRollouts)
        share = float(args.vllm_gpu_memory_utilization) if beside or args.use_vllm else None
    return Load(
        stage="grpo" if grpo else "sft",
        batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        gradient_checkpointing=bool(args.gradient_checkpointing),
        group_size=args.num_generations if grpo else None,
        steps_per_generation=args.steps_per_generation if grpo else None,
        max_completion_tokens=args.max_completion_length if grpo else None,
        vllm_share=share,
        processes=trainer.accelerator.num_processes,
        cuda=args.device.type == "cuda",
    )


def out_of_memory_text(load: Load, error: BaseException) -> str:
    """Return the message for an update that does not fit; on one line."""
    how = (
        "also with one row at a time"
        if load.processes == 1
        else "and with several processes a batch is not halved by itself"
    )
    said = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"out of memory in the update, {how}: {said}. Change, in this order: {'; '.join(memory_advice(load))}"
    )
