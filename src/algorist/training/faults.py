"""Recoverable faults of a step: gradients that are not finite, memory that runs out.

A step whose gradient is not finite changes nothing: weights, moments and counters of the optimizer stay, the batch is saved, the
step is counted. After several in a row the run stops. A step that does not fit into memory is computed in smaller parts with the
same mathematics; the steps after it keep the smaller size.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import TrainerCallback

from algorist.config.schema import GRPOSection, SFTSection
from algorist.errors import TrainingError, is_out_of_memory
from algorist.rollouts.engines import ENGINES

T = TypeVar("T")
log = logging.getLogger("algorist.training.faults")

MAX_BAD_STEPS = 5
"""Consecutive steps without a finite gradient that end the run: the weights or the data are broken, not one batch."""
SCALER_STEPS = 17
"""Further steps that float16's gradient scaler may skip while it halves its factor, from 65,536 to less than 1."""


class FiniteSteps(TrainerCallback):
    """Leaves out optimizer steps whose gradient is not finite.

    Args:
        inputs: Returns what the step was computed from; it is saved beside the checkpoints.
        note: Takes the metric ``update/skipped``.
    """

    def __init__(self, inputs: Callable[[], Any], note: Callable[[dict[str, float]], None]) -> None:
        self.inputs, self.note = inputs, note
        self.bad_steps = 0
        self.bad_steps_in_a_row = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Take the gradients away from the optimizer when they are not finite (clipping keeps a NaN, and makes one of infinity)."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if not gradients:
            return
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if bool(norm.isfinite()):
            self.bad_steps_in_a_row = 0
            return
        if not args.fp16:  # a scaler leaves such steps out itself, and looks for gradients
            for parameter in model.parameters():
                parameter.grad = None  # an optimizer leaves such parameters and their moments alone
        self.bad_steps += 1
        self.bad_steps_in_a_row += 1
        self.note({"update/skipped": 1.0})
        step, bad = state.global_step, self.bad_steps_in_a_row - SCALER_STEPS * args.fp16
        if bad <= 0:
            log.info("step %d: float16 gradients overflow; the step is skipped, the scaler halves", step)
            return
        where = Path(args.output_dir) / f"bad-step-{step}.pt"
        if bad <= MAX_BAD_STEPS and args.should_save:
            where.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"step": step, "inputs": self.inputs()}, where)
        log.warning(
            "step %d: the gradient is not finite; the step is skipped, its batch is in %s", step, where
        )
        if bad >= MAX_BAD_STEPS:
            rate = args.learning_rate
            raise TrainingError(
                f"{self.bad_steps_in_a_row} steps in a row had a gradient that is not finite (the last one is step {step}; its batch "
                f"is in {where}). Usual causes: a learning rate that is too high (it is {rate:g}; take {rate / 10:g}), "
                "weights that are not finite already, or float16 (take model.dtype=bfloat16). The newest checkpoint is "
                "from before these steps or as good as them: they changed nothing"
            )


def until_it_fits(
    trainer: Any, model: Any, compute: Callable[[], T], smaller: Callable[[], bool], *, alone: bool
) -> T:
    """Return the result of ``compute``; when memory runs out, call ``smaller`` and try again.

    Args:
        trainer: Has the recipe's ``section``, and ``args``.
        model: Its gradients are dropped before the next attempt.
        compute: One step's forward and backward passes.
        smaller: Returns False where nothing is left to try.
        alone: No other process waits in the middle of the step.

    Raises:
        TrainingError: The smallest attempt does not fit, or the first one of several processes.
    """
    while True:
        try:
            return compute()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if not alone or not smaller():
                text = out_of_memory_text(trainer.section, trainer.args.device, error, halves=alone)
                raise TrainingError(text) from error
        # Here and not in the handler, whose traceback keeps the failed pass's tensors alive.
        free_memory(model)  # a failed backward may have added a part of its gradient


def free_memory(model: Any) -> None:
    """Drop gradients and what the allocator keeps, before a step is computed again."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def memory_advice(section: SFTSection | GRPOSection, *, cuda: bool) -> list[str]:
    """List the settings that make an update smaller, in the order to try, with values that the recipe takes.

    Batch and accumulation change by one factor, so that a step holds what it held; the group still divides the step.
    """
    grpo = section if isinstance(section, GRPOSection) else None
    stage = "grpo" if grpo else "sft"
    ways = [] if section.gradient_checkpointing else [f"{stage}.gradient_checkpointing=true"]
    if smaller := smaller_batch(section):
        changed = " ".join(f"{stage}.{name}={value}" for name, value in smaller.items())
        ways.append(
            f"{changed} (instead of {section.batch_size} and {section.gradient_accumulation_steps}: the same step in smaller parts)"
        )
    if grpo is not None:
        ways += _smaller_rollouts(grpo)
    ways.append("a smaller model (model.name), or an adapter (model.lora.rank=16)")
    if cuda:
        ways.append("several GPUs that share the weights out (algorist run --launch fsdp2 RECIPE)")
        if not os.environ.get("PYTORCH_ALLOC_CONF"):  # else the command line, or the user, has decided
            ways.append(
                "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment, against fragmentation"
            )
    return ways


def smaller_batch(section: SFTSection | GRPOSection) -> dict[str, int]:
    """Return the settings of the next smaller micro-batch (half, where it is even) with the same step; none at one row."""
    rows = section.batch_size
    part = next((d for d in range(rows // 2, 0, -1) if rows % d == 0), None)
    if part is None:
        return {}
    factor = rows // part
    changed = {
        "batch_size": part,
        "gradient_accumulation_steps": section.gradient_accumulation_steps * factor,
    }
    generation = getattr(section, "steps_per_generation", None)
    return changed if generation is None else changed | {"steps_per_generation": generation * factor}


def _smaller_rollouts(section: GRPOSection) -> list[str]:
    """Return smaller values for what sampling decides: group, completions, the engine's share of the GPU."""
    ways = []
    step = section.batch_size * section.gradient_accumulation_steps
    size = section.group_size
    fits = [g for g in range(2, size) if step % g == 0 and section.rows % g == 0]
    if fits:
        group = min(fits, key=lambda g: abs(g - size / 2))
        ways.append(f"grpo.group_size={group} (instead of {size})")
    if (longest := section.max_completion_tokens) > 1:
        ways.append(f"grpo.max_completion_tokens={longest // 2} (instead of {longest})")
    return ways + ENGINES.get(section.engine).advice(section)


def out_of_memory_text(
    section: SFTSection | GRPOSection, device: torch.device, error: BaseException, *, halves: bool
) -> str:
    """Return the message for an update that does not fit; on one line. ``halves``: smaller parts were tried."""
    why_not = "and smaller parts are not tried where processes work in step"
    how = "also with one row at a time" if halves else why_not
    said = (str(error).splitlines() or [type(error).__name__])[0]
    advice = "; ".join(memory_advice(section, cuda=device.type == "cuda"))
    return f"out of memory in the update, {how}: {said}. Change, in this order: {advice}"
