"""Whether a stage fits into memory, from the model's configuration alone, and what to change in which order where it does not.

The model is made of shapes only (meta device): no weights are read, so a model of any size is planned within seconds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from algorist.config.schema import GRPOSection, Recipe, SFTSection
from algorist.config.section import LoraSection
from algorist.models.load import add_lora
from algorist.models.precision import Precision
from algorist.preflight.memory import MemoryPlan, Shape, evaluations_of, plan_step
from algorist.store.stages import Stage
from algorist.training.extension import Extensions
from algorist.training.faults import smaller_batch
from algorist.training.training_arguments import OF_PARTS

ROOM = 0.9
"""Share of the memory that a plan may take; the rest is for what is not planned."""
MOST_PROCESSES = 64
Plan = Callable[[Recipe], MemoryPlan]
_known_shapes: dict[tuple[str, torch.dtype, str], Any] = {}


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """One change for a stage that does not fit: keys of the recipe, what it does, and the planned peak with it and all before it (bytes)."""

    name: str
    why: str
    change: Mapping[str, Any]
    peak: int

    def as_dict(self) -> dict[str, Any]:
        """Return the advice as ``why`` and ``change`` (key of the recipe → value)."""
        return {"why": self.why, "change": dict(self.change)}


def plan_from_config(
    recipe: Recipe,
    stage: Stage,
    config: Any,
    *,
    dtype: torch.dtype,
    compute: torch.dtype | None = None,
    prompt_tokens: int = 256,
    base_bytes: int = 0,
    device: torch.device | None = None,
) -> MemoryPlan:
    """Return the plan of a stage for a model that is not loaded.

    Args:
        recipe: The resolved recipe.
        stage: The stage; its longest completions are what the recipe allows.
        config: The model's transformers configuration.
        dtype: Type of the weights and gradients.
        compute: Type of the products; the weights' when left out.
        prompt_tokens: Length of the longest prompt in tokens.
        base_bytes: What the process takes beside the weights.
        device: Where the model will be; a GPU when left out.
    """
    precision = Precision(dtype, compute or dtype)
    model = model_of_shapes(config, precision.compute, recipe.model.lora)
    sizes = (
        (p.numel(), dtype.itemsize if p.dtype == precision.compute else p.element_size())
        for p in model.parameters()
    )
    base = base_bytes + sum(count * size for count, size in sizes)
    sft, grpo = recipe.sft, recipe.grpo
    section: SFTSection | GRPOSection = getattr(recipe, stage)
    if stage == "sft":
        longest = min(sft.max_length or 2048, prompt_tokens + grpo.max_completion_tokens)
        prompt = min(prompt_tokens, longest)
        shape = Shape(sft.batch_size, sft.batch_size, prompt, longest - prompt)
    else:
        prompts = max(1, grpo.batch_size // grpo.group_size)
        shape = Shape(grpo.batch_size, prompts, prompt_tokens, grpo.max_completion_tokens)
    return plan_step(
        model,
        shape,
        section,
        base_bytes=base,
        precision=precision,
        part_tokens=section.micro_batch_tokens,
        extensions=Extensions.of(recipe),
        device=device,
        evaluations=evaluations_of(recipe, prompt_tokens),
    )


def memory_steps(recipe: Recipe, stage: Stage, plan: Plan, config: Any, limit: int) -> list[MemoryChange]:
    """List changes that save memory, in this order: gradient checkpointing, a smaller batch, a smaller model, more GPUs.

    Each step builds on those before it; steps that change nothing are left out. Empty when the stage fits into 90 % of
    ``limit`` (bytes). ``plan`` plans the stage of a recipe for a model of ``config``.
    """
    now = plan(recipe)
    if now.peak <= ROOM * limit:
        return []
    start = f"{stage} is planned to take {_gb(now.peak)} of {_gb(limit)} GB"
    steps: list[MemoryChange] = []
    checkpointing = _with(recipe, stage, gradient_checkpointing=True)
    then = plan(checkpointing)
    if then.peak < now.peak:
        steps.append(
            MemoryChange(
                "gradient_checkpointing",
                f"gradient checkpointing: {_gb(then.peak)} GB, {_gb(now.peak - then.peak)} less, for a second forward "
                "pass (a warning about caching is harmless)",
                {f"{stage}.gradient_checkpointing": True},
                then.peak,
            )
        )
        recipe = checkpointing
    recipe, batch = _smaller_batch(recipe, stage, plan, limit)
    now = plan(recipe)
    weights = sum(p.numel() for p in model_of_shapes(config, torch.bfloat16).parameters())
    whole = 2 * weights if stage == "grpo" else 0
    sharding = _sharding(now, limit, whole, getattr(recipe, stage).optim)
    steps += [*batch, _smaller_model(recipe, weights, plan, now, limit), sharding]
    return [replace(steps[0], why=f"{start}; {steps[0].why}"), *steps[1:]]


def measured_steps(recipe: Recipe, stage: Stage, memory: Mapping[str, int], limit: int) -> list[MemoryChange]:
    """Return a smaller batch for a stage whose measured peak is too high and cannot be planned; none at one row."""
    need = max(memory["peak"], memory.get("measured_peak", 0))
    change = {f"{stage}.{name}": value for name, value in smaller_batch(getattr(recipe, stage)).items()}
    why = f"{stage} needs {_gb(need)} of {_gb(limit)} GB; the same step in halves needs less"
    return [MemoryChange("smaller_batch", why, change, need)] if change else []


def _smaller_batch(recipe: Recipe, stage: Stage, plan: Plan, limit: int) -> tuple[Recipe, list[MemoryChange]]:
    """Make the micro-batch smaller until the stage fits or one row is left; the step keeps its size."""
    changed: dict[str, int] = {}
    sizes: list[str] = []
    whole, before, peak = recipe, plan(recipe).peak, 0
    while smaller := smaller_batch(getattr(recipe, stage)):
        changed = smaller
        recipe = _with(recipe, stage, **changed)
        peak = plan(recipe).peak
        sizes.append(f"{changed['batch_size']} ({_gb(peak)} GB)")
        if peak <= ROOM * limit:
            break
    if not changed or peak >= before:  # on a CPU parts are of bounded size whatever the batch
        return whole, []
    change = {f"{stage}.{name}": value for name, value in changed.items()}
    return recipe, [
        MemoryChange(
            "smaller_batch",
            f"a smaller batch with as much more accumulation, the same step: batch_size {', '.join(sizes)}",
            change,
            peak,
        )
    ]


def _smaller_model(recipe: Recipe, weights: int, plan: Plan, now: MemoryPlan, limit: int) -> MemoryChange:
    """Advise an adapter where all weights are trained, and say how large a model would fit."""
    fixed = now.base + now.optimizer + now.gradients
    room = ROOM * limit - (now.peak - fixed)
    fits = max(0.0, room / fixed * weights)
    size = f"about {fits / 1e9:.2g} B parameters fit in its place" if fits < weights else "this size fits"
    why, peak = f"a smaller model: {size}, it has {weights / 1e9:.2g} B (model.name)", now.peak
    if recipe.model.lora is None:
        adapter = plan(_with(recipe, "model", lora=LoraSection())).peak
        why += f"; or this one with an adapter: {_gb(adapter)} GB (model.lora.rank=16)"
        peak = min(peak, adapter)
    return MemoryChange("smaller_model", why, {}, peak)


def _sharding(now: MemoryPlan, limit: int, whole: int, optim: str) -> MemoryChange:
    """Advise FSDP2, or ZeRO-3 for other optimisers: weights, gradients and optimizer states are shared out; activations, or the ``whole``
    weights of rollouts in 16 bit, are not."""
    shared = now.base + now.optimizer + now.gradients
    rest = max(now.peak - shared, whole)
    left = ROOM * limit - rest
    count = max(2, math.ceil(shared / left)) if left > 0 else MOST_PROCESSES + 1
    peak = rest if count > MOST_PROCESSES else shared // count + rest
    name, launch = ("FSDP2", "fsdp2") if optim in OF_PARTS else ("DeepSpeed ZeRO", "zero3")
    why = f"{name} on {count} GPUs: {_gb(peak)} GB on each: algorist run -n {count} --launch {launch} RECIPE"
    if count > MOST_PROCESSES:
        why = f"{name} shares the weights out, but the rest alone does not fit: after the changes above, --launch {launch}"
    return MemoryChange("sharding", why, {}, peak)


def model_of_shapes(config: Any, dtype: torch.dtype, lora: LoraSection | None = None) -> Any:
    """Return the model on the meta device, each made once."""
    key = (config.to_json_string(), dtype, repr(lora))
    if key not in _known_shapes:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
            )
            _known_shapes[key] = model if lora is None else add_lora(model, lora)
    return _known_shapes[key]


def _with(recipe: Recipe, section: str, **changes: Any) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=changes)})


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"
