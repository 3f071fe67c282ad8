"""Log-probs of the completions of a batch under a model: packed without waste, or plainly.

The packed pass computes each prompt once for its whole group, no padding, and the head at completion positions only. It is used
for a model when it reproduces that model's own forward, which is checked once on real rows; any other model takes the plain
pass, with one line in the log that says why. Both give the same numbers in the same places.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from algorist.models.float32_attention import float32_attention
from algorist.models.modes import eval_mode
from algorist.models.precision import on_gpu
from algorist.models.products import fast_linear
from algorist.models.sharding import plain_class, unwrap, wrapped_module
from algorist.training.batch import Batch
from algorist.training.lm_head import AtHead, OfHead, altered_logits, completion_log_probs
from algorist.training.packed import Layout, NotPackable, pack, tiles
from algorist.training.shared_prefix import SHORT_CONVOLUTIONS, packed_attention

log = logging.getLogger("algorist.training.log_probs")

COMPARED_TOKENS, COMPARED_LENGTH = 64, 128
LARGEST_GAP, MEAN_GAP = 1e-3, {torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Accepted difference of log-probs between the packed pass and the plain one: of each token in float32, of their mean in 16 bit, where
single tokens are off by 0.3 however they are computed (SmolLM2-135M in bfloat16: mean 0.02 to 0.03, largest 0.3, against float32)."""

Autocast = Callable[[], AbstractContextManager[Any]]


class LogProbs:
    """Computes log-probs of batches: packed where the model is covered, plainly elsewhere.

    Args:
        temperature: Logits are divided by it.
        compute_top1: Put into ``batch.extra["is_top1"]`` (B, T) whether each token is the likeliest.
        packed: Use the packed pass where it applies.
        verify: Compare it with the plain pass at the first use of a model.
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        compute_top1: bool = False,
        packed: bool = True,
        verify: bool = True,
    ) -> None:
        self.temperature, self.compute_top1, self.packed, self.verify = (
            temperature,
            compute_top1,
            packed,
            verify,
        )
        self.sparing = False
        self._verdicts: weakref.WeakKeyDictionary[nn.Module, str | None] = weakref.WeakKeyDictionary()
        self._said: set[str] = set()

    def __call__(
        self,
        model: nn.Module,
        batch: Batch,
        *,
        compute_entropy: bool = False,
        of_head: Mapping[str, OfHead] | None = None,
        autocast: Autocast = nullcontext,
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs (B, T) of the completions and, if asked for, entropies (B, T), in nats, float32, 0 in the padding.

        Args:
            model: A causal language model, possibly wrapped by PEFT, DDP or FSDP2.
            batch: At least one completion; no prompt and no completion is empty.
            compute_entropy: Also return the entropy of each next-token distribution.
            of_head: Further numbers per token that are computed at the head; they are put into ``batch.extra`` under these names.
            autocast: Makes the context of the forward.
        """
        ways: dict[str, Any] = {"temperature": self.temperature, "compute_entropy": compute_entropy}
        ways |= {"of_head": of_head, "compute_top1": self.compute_top1}
        reason = self.why_plain(model, batch, autocast) if self.packed else "it is switched off"
        if reason is None:
            try:
                return packed_log_probs(model, batch, autocast=autocast, sparing=self.sparing, **ways)
            except NotPackable as error:
                reason = str(error)
        if self.packed and reason not in self._said:
            self._said.add(reason)
            log.warning("the packed log-prob pass is off: %s; each completion is computed alone", reason)
        return plain_log_probs(model, batch, autocast=autocast, **ways)

    def spare_memory(self, model: nn.Module, tokens: int) -> bool:
        """Compute recomputed layers with the least memory from now on; False where that is so already, or would save nothing.

        ``tokens`` are those of the completion that does not fit, its prompt included.
        """
        base = unwrap(model)
        in_tiles = any(tiles(getattr(m, "mlp", None), tokens) > 1 for m in base.modules())
        on_host = on_gpu(next(base.parameters()).device)
        if self.sparing or not self.packed or not recomputes(base) or not (in_tiles or on_host):
            return False
        self.sparing = True
        ways = ["the MLPs in tiles, each computed once more"] * in_tiles + [
            "the layers' inputs in the host's memory"
        ] * on_host
        log.warning(
            "out of memory with one completion of %d tokens, its prompt included; continuing with %s: slower, same mathematics",
            tokens,
            " and ".join(ways),
        )
        return True

    def why_plain(self, model: nn.Module, batch: Batch, autocast: Autocast = nullcontext) -> str | None:
        """Return the reason a model cannot use the packed pass, or None; the first call compares the two passes."""
        base = unwrap(model)
        reason = _refusal(model, base)
        if reason is None and self.verify and base not in self._verdicts:
            try:
                self._verdicts[base] = self._difference(base, batch, autocast)
            except NotPackable as error:
                return str(error)
        return reason or self._verdicts.get(base)

    @torch.no_grad()
    def _difference(self, base: Any, batch: Batch, autocast: Autocast) -> str | None:
        """Return by how much the packed pass differs from the plain one on the shortest completions, if by too much.

        On their beginnings: the plain pass makes the logits of every position, which no recipe has planned for.
        """
        tokens = 0
        shortest: list[int] = []
        for row in sorted(range(len(batch)), key=lambda row: len(batch.completions[row])):
            if len(shortest) < 2 or tokens < COMPARED_TOKENS:
                shortest.append(row)
                tokens += len(batch.completions[row])
        few = batch.take(batch.in_group_order(shortest)).cut(COMPARED_LENGTH)
        tokens = sum(map(len, few.completions))
        with eval_mode(base):
            ours, _ = packed_log_probs(base, few, temperature=self.temperature, autocast=autocast)
            own, _ = plain_log_probs(base, few, temperature=self.temperature, autocast=autocast)
        with autocast():
            kind, dtype = ours.device.type, next(base.parameters()).dtype
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
        gaps = (ours - own).abs()
        gap = float(gaps.sum() / tokens if dtype in MEAN_GAP else gaps.max())
        if gap <= MEAN_GAP.get(dtype, LARGEST_GAP) / min(1.0, self.temperature):
            return None
        return f"the packed forward of {type(base).__name__} differs from its own by {gap:.1e} in log-prob"


def packed_log_probs(
    model: nn.Module,
    batch: Batch,
    *,
    temperature: float = 1.0,
    compute_entropy: bool = False,
    compute_top1: bool = False,
    of_head: Mapping[str, OfHead] | None = None,
    autocast: Autocast = nullcontext,
    sparing: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs (B, T) and entropies (B, T) or None by one forward over the packed batch.

    Completions of a prompt must follow each other (``Batch.in_group_order``). Arguments as for ``LogProbs``; ``sparing``:
    recomputed layers take the least memory.

    Raises:
        NotPackable: The packed forward would not compute what the model computes.
    """
    _add_packed_forward(unwrap(model))
    layout = pack(batch)
    with autocast():
        result = model(
            packed_layout=layout,
            temperature=temperature,
            compute_entropy=compute_entropy,
            compute_top1=compute_top1,
            of_head=of_head,
            sparing=sparing,
        )
    values = {name: _in_place(values_M, layout.scatter_M, batch) for name, values_M in result.items()}
    batch.extra |= {name: value for name, value in values.items() if name not in ("log_probs", "entropy")}
    return values["log_probs"], values.get("entropy")


def _in_place(values_M: Tensor, places_M: Tensor, batch: Batch) -> Tensor:
    """Return numbers per token (M, …) in their places (B, T, …), 0 elsewhere."""
    flat = values_M.new_zeros(len(batch) * batch.width, *values_M.shape[1:])
    return flat.index_copy(0, places_M, values_M).unflatten(0, (len(batch), batch.width))


def plain_log_probs(
    model: nn.Module,
    batch: Batch,
    *,
    temperature: float = 1.0,
    compute_entropy: bool = False,
    compute_top1: bool = False,
    of_head: Mapping[str, OfHead] | None = None,
    autocast: Autocast = nullcontext,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs (B, T) and entropies (B, T) or None by the model's own forward, rows padded on the right; any model."""
    device = batch.mask.device
    rows = [batch.prompts[p] + ids for p, ids in zip(batch.prompt_of, batch.completions, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    lengths = torch.tensor([len(completion) for completion in batch.completions], device=device)
    starts = torch.tensor([len(row) for row in rows], device=device) - lengths
    attended = torch.arange(longest, device=device) < (starts + lengths)[:, None]
    steps = torch.arange(batch.width, device=device)
    padding = steps >= lengths[:, None]
    places = (starts[:, None] + steps).clamp(max=longest - 1)  # (B, T) of the completion's tokens
    base = unwrap(model)
    ways: dict[str, Any] = {"input_ids": ids, "attention_mask": attended.long(), "use_cache": False}
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        ways["logits_to_keep"] = longest - int(starts.min()) + 1
    # A checkpointed layer runs again in the backward pass, where neither would be in force.
    with autocast(), ExitStack() as stack:
        if not recomputes(base):
            stack.enter_context(fast_linear())
            stack.enter_context(float32_attention(base))
        logits = model(**ways).logits
    predicting = places - 1 - (longest - logits.shape[1])
    predicting = predicting[..., None].expand(-1, -1, logits.shape[-1])
    logits = logits.gather(1, predicting)
    logs = torch.log_softmax(logits.float() / temperature, -1)
    targets = ids.gather(1, places)
    if compute_top1:
        batch.extra["is_top1"] = logits.argmax(-1) == targets
    of_targets = logs.gather(-1, targets[..., None]).squeeze(-1)
    for name, compute in (of_head or {}).items():
        places_M = (~padding).flatten().nonzero()[:, 0]
        head = AtHead(logits[~padding], None, None, targets[~padding], places_M, temperature)
        batch.extra[name] = _in_place(compute(head), places_M, batch)
    entropy = -(logs.exp() * logs).sum(-1).masked_fill(padding, 0.0) if compute_entropy else None
    return of_targets.masked_fill(padding, 0.0), entropy


def _add_packed_forward(base: Any) -> None:
    """Let the model's forward take ``packed_layout``; wrappers such as DDP, FSDP and PEFT pass it through."""
    if getattr(base, "_algorist_packed", False):
        return
    bound = base.forward
    # Of its class, not bound to ``base``: a copy of the model (the KL's reference) runs itself.
    original = getattr(bound, "__func__", lambda _, *args, **kwargs: bound(*args, **kwargs))

    @functools.wraps(original)
    def forward(self: Any, *args: Any, packed_layout: Layout | None = None, **kwargs: Any) -> Any:
        if packed_layout is None:
            return original(self, *args, **kwargs)
        return _forward_packed(self, packed_layout, **kwargs)

    base.forward = types.MethodType(forward, base)
    base._algorist_packed = True
    for module in base.modules():
        if hasattr(module, "lora_A") and plain_class(module).__name__ == "Linear":
            module.forward = functools.partial(_lean_lora, module, module.forward)  # type: ignore[method-assign]


def _lean_lora(module: Any, original: Callable[..., Tensor], x: Tensor, *args: Any, **more: Any) -> Tensor:
    """PEFT's forward of an adapted layer under autocast: one new tensor as wide as the output, which takes four, and no float32 input."""
    seconds = {name: module.lora_B[name] for name in module.active_adapters if name in module.lora_B}
    special = args or more or module.disable_adapters or module.merged or module.lora_variant or x.dim() != 3
    # Weights that ZeRO has taken apart are there within their own module's forward only.
    whole = all(second.bias is None and second.weight.dim() == 2 for second in seconds.values())
    if special or not whole or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return original(x, *args, **more)
    result: Tensor = module.base_layer(x)
    for name, second in seconds.items():
        low = module.lora_A[name](module.lora_dropout[name](x)) * module.scaling[name]
        result = result.baddbmm_(low, second.weight.t().to(result.dtype).expand(len(x), -1, -1))
    return result


def _forward_packed(
    base: Any,
    layout: Layout,
    temperature: float,
    compute_entropy: bool,
    compute_top1: bool = False,
    of_head: Mapping[str, OfHead] | None = None,
    sparing: bool = False,
    **_: Any,
) -> dict[str, Tensor]:
    # A checkpointed layer runs again in the backward pass, where fast_linear would not be in force.
    with (
        packed_attention(base, layout, sparing=sparing),
        nullcontext() if recomputes(base) else fast_linear(),
    ):
        output = base.base_model(
            input_ids=layout.tokens_N[None],
            position_ids=layout.positions_N[None],
            attention_mask=None,
            use_cache=False,
        )
    hidden = output.last_hidden_state[0].index_select(0, layout.predict_M)
    hidden = hidden / getattr(base.config.get_text_config(), "logits_scaling", 1.0)
    head = base.get_output_embeddings()

    def score(hidden_MH: Tensor) -> dict[str, Tensor]:
        bias = getattr(head, "bias", None)
        scores = completion_log_probs(
            hidden_MH,
            head.weight,
            bias,
            layout.targets_M,
            temperature=temperature,
            compute_entropy=compute_entropy,
            compute_top1=compute_top1,
        )
        values = {name: value for name, value in scores._asdict().items() if value is not None}
        at = AtHead(hidden_MH, head.weight, bias, layout.targets_M, layout.scatter_M, temperature)
        return values | {name: compute(at) for name, compute in (of_head or {}).items()}

    own = head.__dict__.get("forward")
    head.forward = score  # called as a module: FSDP gathers its weights before, and reduces their gradients
    try:
        result: dict[str, Tensor] = head(hidden)
    finally:
        del head.forward
        if own is not None:
            head.forward = own
    return result


def recomputes(base: Any) -> bool:
    """Return whether the model is training with activation checkpointing."""
    name = "is_activation_checkpointing"  # its name in transformers 5.23; 5.17 has the other
    name = name if hasattr(type(base), name) else "is_gradient_checkpointing"
    return bool(base.training and getattr(base, name, False))


def stop_recomputing(base: Any) -> None:
    """Switch activation checkpointing off."""
    newer = getattr(base, "activation_checkpointing_disable", None)  # transformers 5.23; 5.17 has the other
    (newer or base.gradient_checkpointing_disable)()


def _refusal(model: nn.Module, base: Any) -> str | None:
    """Return the reason this model cannot use the packed forward in its present state, or None."""
    inner = wrapped_module(model)
    name = type(base).__name__
    if any("FullyShardedDataParallel" in k.__name__ for k in type(inner).__mro__):
        return "the model is sharded by FSDP version 1"
    peft = getattr(inner, "peft_config", None) or {}
    if any(getattr(config, "is_prompt_learning", False) for config in peft.values()):
        return "the adapter prepends virtual tokens"
    if not hasattr(base, "config") or not hasattr(base, "get_output_embeddings"):
        return f"{name} is not a transformers causal language model"
    if hasattr(base.get_output_embeddings(), "base_layer"):
        return f"the adapter changes the head of {name}"
    if not getattr(base, "_supports_attention_backend", False):
        return f"{name} does not take another attention function"
    config = base.config.get_text_config()
    covered = {"full_attention", "sliding_attention"}
    if any(plain_class(module).__name__ in SHORT_CONVOLUTIONS for module in base.modules()):
        covered.add("conv")
    odd = sorted(set(getattr(config, "layer_types", None) or []) - covered)
    if odd:
        return f"{name} has layers of type {', '.join(odd)}"
    altered = altered_logits(config)
    if altered is not None:
        return f"{name} uses {altered}"
    return None
