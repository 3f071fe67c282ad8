"""Peak memory of a stage, planned item by item, and as measured.

Weights, gradients, optimizer states and the KV cache follow from shapes. What the backward pass keeps of the forward pass is
counted on a short real forward (the bytes that autograd saves, per token) and scaled to the longest batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from algorist.config.schema import GRPOSection, Recipe, SFTSection
from algorist.models.memory import memory_limit, memory_now
from algorist.models.precision import Precision, compute_dtype, weight_dtype
from algorist.models.sharding import unwrap
from algorist.rollouts.native.decoder import cache_dtype
from algorist.rollouts.native.decoder_tier import PREFILL_TOKENS, rows_at_a_time
from algorist.rollouts.native.engine import CACHE_SHARE
from algorist.rollouts.native.graph_buffers import Room, slots_for
from algorist.rollouts.native.graph_tier import KEPT_SHARE
from algorist.training.batch import Batch
from algorist.training.extension import Extensions
from algorist.training.part_size import head_bytes, kept_per_token, state_bytes, tokens_in, tokens_that_fit

HOLES, ADAPTER_HOLES = 0.25, 0.4
"""Memory that the C allocator keeps in holes between what stays and what is freed, as a share of the activations (CPU only): a third in
SFT of 135 M weights in parts of other sizes, less where they are alike; adapters make several short-lived tensors in each layer
(benchmarks/memory_plan.py)."""


LOGITS = 4
"""Tensors of all rows' logits that sampling holds at once, in float32."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes at the peak of a stage. ``base`` is what the process holds already, weights included (device: weights only);
    ``engine`` what the engine keeps of its cache in an update, ``extensions`` what extensions hold in one, ``scoring`` what one takes
    between sampling and update, ``stepping`` the optimizer beside what it keeps."""

    base: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    kv_cache: int
    allocator: int = 0
    extensions: int = 0
    scoring: int = 0
    engine: int = 0
    stepping: int = 0

    @property
    def peak(self) -> int:
        """Rollouts, scoring and updates take turns: the largest counts."""
        update = (
            self.gradients + self.activations + self.allocator + self.logits + self.extensions + self.engine
        )
        stepping = self.gradients + self.extensions + self.stepping
        return self.base + self.optimizer + max(update, self.kv_cache, self.scoring, stepping)

    def as_dict(self) -> dict[str, int]:
        """Return the parts and the peak in bytes."""
        return {**asdict(self), "peak": self.peak}


@dataclass(frozen=True, slots=True)
class Shape:
    """The largest batch of a stage: rows of one forward, distinct prompts, tokens of a prompt and of a completion.

    ``total_tokens`` is what all completions hold together where they are not padded.
    """

    rows: int
    prompts: int
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """Completions that an engine is asked for at once, those of one prompt, and the tokens of the longest prompt and completion."""

    rows: int
    group_size: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step of GRPO as extensions are asked about its memory (``Extension.preview``).

    Attributes:
        model: The policy, or its shapes.
        rows: Completions of a step.
        width: Tokens of the longest.
        tokens: Completion tokens of one forward and backward.
        loaded: What an extension loads is counted already.
    """

    model: Any
    rows: int
    width: int
    tokens: int
    loaded: bool


def plan_step(
    model: Any,
    shape: Shape,
    section: SFTSection | GRPOSection,
    *,
    base_bytes: int | None = None,
    precision: Precision | None = None,
    part_tokens: int | None = None,
    extensions: Extensions | None = None,
    device: torch.device | None = None,
    evaluations: Sequence[Request] = (),
) -> MemoryPlan:
    """Return the plan of a step of SFT, or of GRPO with its sampling.

    Args:
        model: The policy; one on the meta device has shapes only.
        shape: The largest micro-batch.
        section: The recipe's settings of the stage.
        base_bytes: What is taken before the step, weights included; what this process takes now when left out.
        precision: Types of weights and products, for a model of shapes only, which has the products' type.
        part_tokens: Most tokens of one forward and backward.
        extensions: Those that take part in GRPO; with ``base_bytes`` their models are not in it.
        device: Where a model of shapes only will be; a GPU when left out.
        evaluations: What is sampled between steps and after them; on a CPU it is planned too.
    """
    base = unwrap(model)
    own = next(base.parameters()).device
    device = own if own.type != "meta" else device or torch.device("cuda")
    precision = precision or Precision(weight_dtype(model), compute_dtype(model))
    grpo = section if isinstance(section, GRPOSection) else None
    fixed = _fixed(model, base_bytes, precision, section.optim)
    if on_cpu := device.type == "cpu":
        fixed = replace(
            fixed, stepping=2 * max((4 * p.numel() for p in model.parameters() if p.requires_grad), default=0)
        )
    completions = shape.rows * shape.completion_tokens

    def with_extensions(plan: MemoryPlan) -> MemoryPlan:
        if grpo is None or extensions is None:
            return plan
        rows, width = shape.rows * grpo.gradient_accumulation_steps, shape.completion_tokens
        step = PlannedStep(base, rows, width, completions, base_bytes is None)
        sizes = [says["bytes"] for says in extensions.preview(step).values() if "bytes" in says]
        most_alone = max((alone for _, alone in sizes), default=0)
        return replace(plan, extensions=sum(held for held, _ in sizes), scoring=most_alone)

    requests = list(evaluations)
    if grpo is not None:
        requests.append(Request(grpo.rows, grpo.group_size, shape.prompt_tokens, grpo.max_completion_tokens))
    if on_cpu and requests:
        fixed = _sampling_on_cpu(base, fixed, requests, precision)
    elif grpo is not None:
        fixed = _with_sampling(base, fixed, shape.prompt_tokens, grpo, precision)
    fixed = with_extensions(fixed)
    part_tokens = part_tokens or _part_tokens(model, base, fixed, section, precision, device)
    tokens, completions = _largest_part(shape, section, part_tokens)
    activations = _activations(base, tokens, section.gradient_checkpointing, precision)
    adapter = not all(p.requires_grad for p in model.parameters())
    holes = 0.0 if torch.cuda.is_available() else ADAPTER_HOLES if adapter else HOLES
    plan = replace(
        fixed,
        activations=activations,
        logits=head_bytes(base, completions, precision, device),
        allocator=int(holes * activations),
    )
    return with_extensions(plan)


def evaluations_of(recipe: Recipe, prompt_tokens: int, problems: int | None = None) -> list[Request]:
    """List the requests of a recipe's evaluations: greedy completions, and the sampled ones."""
    section = recipe.eval
    new = section.max_completion_tokens or recipe.grpo.max_completion_tokens
    prompts = min(section.batch_size, problems or section.batch_size)
    counts = {1, section.samples or 1} if section.enabled else ()
    return [Request(prompts * count, count, prompt_tokens, new) for count in counts]


def _largest_part(
    shape: Shape, section: SFTSection | GRPOSection, most_tokens: int | None
) -> tuple[int, int]:
    """Return the tokens of the largest part of a step, and those of its completions: each of the mean length, or one of the longest."""
    rows = shape.rows * section.gradient_accumulation_steps
    size = max(1, (shape.total_tokens or shape.rows * shape.completion_tokens) // shape.rows)
    prompt_of = [row // getattr(section, "group_size", 1) for row in range(rows)]
    prompts = [[0] * shape.prompt_tokens] * (prompt_of[-1] + 1)
    batch = Batch(prompts, [[0] * size] * rows, prompt_of, torch.zeros(rows), torch.ones(rows, 1))
    parts = batch.parts(range(rows), most_rows=shape.rows, most_tokens=most_tokens)
    largest = max(parts, key=batch.packed_tokens)
    tokens = max(batch.packed_tokens(largest), shape.prompt_tokens + shape.completion_tokens)
    return tokens, max(size * len(largest), shape.completion_tokens)


def _with_sampling(
    base: Any, plan: MemoryPlan, prompt_tokens: int, section: GRPOSection, precision: Precision
) -> MemoryPlan:
    """Add the memory of sampling: the cache of all rows at their longest and their logits, and the share that stays in the update."""
    rows, new = section.rows, section.max_completion_tokens
    prompts = -(-rows // section.group_size)
    copies = sum(p.numel() for p in base.parameters()) * precision.compute.itemsize * precision.autocast
    logits = 3 * 4 * rows * _head(base)
    if not torch.cuda.is_available():  # a GPU of any size
        cache = (prompts * prompt_tokens + rows * new) * _cache_bytes(
            base, precision, next(base.parameters()).device
        )
        return replace(plan, kv_cache=cache + copies + logits)
    room = Room(slots_for(rows), prompts, section.group_size, prompt_tokens, new, rows * new).rounded()
    free = memory_limit() - plan.base - plan.optimizer
    cache = int(
        min(
            room.cached * _cache_bytes(base, precision, next(base.parameters()).device),
            CACHE_SHARE * (free - copies),
        )
    )
    names = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "lora_A", "lora_B")
    if not copies:  # of these the decoder has its own, one beside the other
        copies = sum(p.numel() for n, p in base.named_parameters() if any(name in n for name in names))
        copies *= precision.compute.itemsize
    held = cache + copies if section.engine in ("auto", "native") else 0
    stays = held if held <= free // KEPT_SHARE else 0
    return replace(plan, kv_cache=cache + copies + logits, engine=stays)


def _sampling_on_cpu(
    base: Any, plan: MemoryPlan, requests: Sequence[Request], precision: Precision
) -> MemoryPlan:
    """Add the memory of sampling: weights laid out for decoding, and the most of one as it is made, of prompts' pass, of cache and logits."""
    config = base.config.get_text_config()
    linear = [p.numel() for name, p in base.named_parameters() if p.dim() == 2 and "lora_" not in name]
    if base.get_output_embeddings().weight is not base.get_input_embeddings().weight:
        linear.remove(base.get_input_embeddings().weight.numel())
    laid_out, being_made = (precision.compute.itemsize * count for count in (sum(linear), 2 * max(linear)))
    token = _cache_bytes(base, precision, torch.device("cpu"))

    def taken(request: Request) -> int:
        rows = rows_at_a_time(config.hidden_size, torch.device("cpu"), request.rows)
        waits = rows < request.rows
        prompts = (-(-rows // request.group_size) + waits) * request.prompt_tokens
        times = request.new_tokens * (1.5 if waits else 1)  # rows that come later begin later
        width = 3 * config.intermediate_size + 8 * config.hidden_size
        first_pass = 4 * width * min(prompts, max(PREFILL_TOKENS, request.prompt_tokens))
        decoding = int(rows * times * token) + LOGITS * 4 * rows * _head(base)
        return prompts * token + max(first_pass, decoding)

    return replace(plan, kv_cache=laid_out + max(being_made, *map(taken, requests)))


def _part_tokens(
    model: Any,
    base: Any,
    plan: MemoryPlan,
    section: SFTSection | GRPOSection,
    precision: Precision,
    device: torch.device,
) -> int | None:
    """Return the tokens of one forward and backward as the first update will count them; None: all."""
    if next(base.parameters()).device.type != "meta":
        return tokens_that_fit(model, section, coming=plan.engine + plan.extensions)
    if section.micro_batch_tokens is not None or (device.type != "cpu" and not torch.cuda.is_available()):
        return section.micro_batch_tokens
    left = memory_limit() - plan.base - plan.optimizer - plan.gradients - plan.engine - plan.extensions
    return tokens_in(left, kept_per_token(base, precision), base, section, precision, device)


def _activations(base: Any, tokens: int, recompute: bool, precision: Precision) -> int:
    """Estimate the bytes that the forward pass of ``tokens`` tokens keeps for the backward pass.

    With gradient checkpointing that is each layer's input, and everything inside one layer at a time. The transient tensors of the
    backward pass are counted in.
    """
    per_token = kept_per_token(base, precision)
    config = base.config.get_text_config()
    layers, width = max(1, int(config.num_hidden_layers)), int(config.hidden_size)
    every = int(per_token * tokens)
    inside = every // layers
    # Under autocast each weight's 16-bit copy is kept until the backward pass of its layer.
    copies = sum(p.numel() for p in base.parameters()) * precision.compute.itemsize * precision.autocast
    if not recompute:  # the backward pass holds gradients of a layer's widest tensors beside what was kept
        return every + copies + (every + copies) // layers
    # Those gradients are counted on shapes: about a third of what a layer keeps.
    return tokens * width * layers * precision.master.itemsize + inside + inside // 3 + copies // layers


def _fixed(model: Any, base_bytes: int | None, precision: Precision, optim: str) -> MemoryPlan:
    """Return the plan of what does not depend on the batch: weights, gradients, optimizer states."""
    trained = [p for p in model.parameters() if p.requires_grad]
    shapes_only = bool(trained) and trained[0].device.type == "meta"
    # A model of shapes only has the products' type; an adapter's factors have their own.
    small = min(precision.compute.itemsize, precision.master.itemsize)
    sizes = [
        precision.master.itemsize if shapes_only and p.element_size() == small else p.element_size()
        for p in trained
    ]
    size = sum(p.numel() * itemsize for p, itemsize in zip(trained, sizes, strict=True))
    states = sum(p.numel() for p in trained) * state_bytes(optim)
    taken = memory_now() if base_bytes is None else base_bytes
    return MemoryPlan(taken, size, states, 0, 0, 0)


def _head(base: Any) -> int:
    return int(base.get_output_embeddings().weight.shape[0])


def _cache_bytes(base: Any, precision: Precision, device: torch.device) -> int:
    """Return the KV cache of one token in bytes."""
    config = base.config.get_text_config()
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    kind = cache_dtype(precision.compute, device)
    return 2 * int(config.num_hidden_layers) * heads * width * kind.itemsize
