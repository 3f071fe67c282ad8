"""The log-prob pass of an update without waste: prompts once per group, no padding, head at completions only.

``FastUpdate.log_probs`` answers TRL's ``_get_per_token_logps_and_entropies``: the same numbers in the same (B, T)
places, so TRL's loss runs unchanged. A model is covered when the packed forward reproduces its own forward, which is
checked once on real rows; what is not covered falls back to TRL's pass with one line in the log.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from algorist.training.head import altered_logits, completion_log_probs
from algorist.training.linear import fast_linear
from algorist.training.packed import ATTENTION_NAME, Layout, NotCovered, pack, packed_attention

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""Largest accepted difference of a log-prob between the packed forward and the model's own, per dtype."""


class FastUpdate:
    """Runs the shared-prefix log-prob pass for every model that it covers.

    Args:
        temperature: Logits are divided by it, as in TRL.
        micro_batch_tokens: Packed tokens of one forward; larger inputs are split and, with gradients, recomputed part
            by part in the backward pass. None means no bound.
        cast_head_to_fp32: Run the head in float32, as TRL's option of that name.
        verify: Compare with the model's own forward at the first use.
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        micro_batch_tokens: int | None = None,
        cast_head_to_fp32: bool = False,
        verify: bool = True,
    ) -> None:
        self.temperature = temperature
        self.micro_batch_tokens = micro_batch_tokens
        self.cast_head_to_fp32 = cast_head_to_fp32
        self.verify = verify
        self._largest = (0, 0)  # packed tokens and rows of the largest part so far
        self._verdicts: dict[int, str | None] = {}
        self._said: set[str] = set()

    def log_probs(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *,
        compute_entropy: bool = False,
        keep_rows: Tensor | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return log-probs and entropies of the completions, zero where masked, or None when not covered.

        Args:
            model: The policy or reference as TRL passes it (possibly wrapped by PEFT or DDP).
            input_ids: (B, P + T), prompts padded left, completions padded right.
            attention_mask: (B, P + T).
            logits_to_keep: T.
            compute_entropy: Also return entropies.
            keep_rows: (B,) bool; other rows are not computed and stay zero. None computes all.
            autocast: Makes the context of the forward.

        Returns:
            Log-probs (B, T) and entropies (B, T) or None, both float32; or None.
        """
        base = unwrap(model)
        reason = _refusal(model, base)
        if reason is None and id(base) in self._verdicts:
            reason = self._verdicts[id(base)]
        if reason is not None:
            self._fall_back(reason)
            return None
        rows = _rows(input_ids, attention_mask, logits_to_keep, keep_rows)
        if isinstance(rows, str):
            self._fall_back(rows)
            return None
        try:
            if self.verify and id(base) not in self._verdicts:
                reason = self._compare(model, base, rows, input_ids, attention_mask, logits_to_keep, autocast)
                self._verdicts[id(base)] = reason
                if reason is not None:
                    self._fall_back(reason)
                    return None
            shape = (input_ids.shape[0], logits_to_keep)
            return self._run(model, base, rows, shape, compute_entropy, autocast)
        except NotCovered as error:
            self._fall_back(str(error))
            return None

    def halve(self) -> bool:
        """Halve ``micro_batch_tokens`` (from the largest part seen); return False when parts are single rows already."""
        tokens, rows = self._largest
        if rows <= 1:
            return False
        self.micro_batch_tokens = max(1, tokens // 2)
        self._largest = (0, 0)
        log.warning(
            "out of memory with %d tokens (%d rows) in one part of the update; going on with parts of %d tokens, "
            "same mathematics",
            tokens,
            rows,
            self.micro_batch_tokens,
        )
        return True

    def _fall_back(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log.warning("fast update is off for this pass: %s; TRL's own log-prob pass runs instead", reason)

    def _run(
        self,
        model: nn.Module,
        base: nn.Module,
        rows: list[tuple[int, list[int], list[int]]],
        shape: tuple[int, int],
        compute_entropy: bool,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> tuple[Tensor, Tensor | None]:
        device = next(base.parameters()).device
        total = torch.zeros(shape[0] * shape[1], dtype=torch.float32, device=device)
        entropy = torch.zeros_like(total) if compute_entropy else None
        parts = _split(rows, self.micro_batch_tokens)
        for part in parts:
            self._largest = max(self._largest, (_tokens(part), len(part)))
            layout = pack(
                [p for _, p, _ in part], [c for _, _, c in part], [r for r, _, _ in part], shape[1], device
            )

            def forward(layout: Layout = layout) -> tuple[Tensor, Tensor | None]:
                with autocast():
                    return packed_forward(
                        model, base, layout, self.temperature, compute_entropy, self.cast_head_to_fp32
                    )

            if len(parts) > 1 and torch.is_grad_enabled():
                found, found_entropy = checkpoint(forward, use_reentrant=False)
            else:
                found, found_entropy = forward()
            total = total.index_copy(0, layout.scatter_M, found)
            if entropy is not None and found_entropy is not None:
                entropy = entropy.index_copy(0, layout.scatter_M, found_entropy)
        if torch.is_grad_enabled() and not total.requires_grad:
            total = total + _zero(base)
        return total.view(shape), entropy.view(shape) if entropy is not None else None

    @torch.no_grad()
    def _compare(
        self,
        model: nn.Module,
        base: nn.Module,
        rows: list[tuple[int, list[int], list[int]]],
        input_ids: Tensor,
        attention_mask: Tensor,
        width: int,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> str | None:
        """Return why the packed forward differs from the model's own on two rows, or None if it does not."""
        chosen = sorted(rows, key=lambda row: len(row[1]) + len(row[2]))[:2]
        if not chosen:
            return None
        training = [module for module in base.modules() if module.training]
        base.eval()
        try:
            ours, _ = self._run(base, base, chosen, (input_ids.shape[0], width), False, autocast)
            worst = 0.0
            for row, prompt, completion in chosen:
                ids = torch.tensor([prompt + completion], device=input_ids.device)
                with autocast():
                    logits = base(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
                logs = torch.log_softmax(logits / self.temperature, -1)
                own = logs.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
                worst = max(worst, float((ours[row, : len(completion)] - own).abs().max()))
        finally:
            for module in training:
                module.training = True
        dtype = next(base.parameters()).dtype
        with autocast():
            kind = input_ids.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
        if worst <= TOLERANCE.get(dtype, 1e-3):
            return None
        return f"the packed forward of {type(base).__name__} differs from its own by {worst:.1e} in log-prob"


def packed_forward(
    model: nn.Module,
    base: nn.Module,
    layout: Layout,
    temperature: float,
    compute_entropy: bool,
    cast_head: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies (M,) of the layout's targets; runs through the wrappers of ``model``."""
    _add_packed_forward(base)
    result = model(
        packed_layout=layout, temperature=temperature, compute_entropy=compute_entropy, cast_head=cast_head
    )
    return result["log_probs"], result.get("entropy")


def _add_packed_forward(base: nn.Module) -> None:
    """Teach the model's forward to take ``packed_layout`` (wrappers such as DDP and PEFT pass it through)."""
    if getattr(base, "_algorist_packed", False):
        return
    original = base.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, packed_layout: Layout | None = None, **kwargs: Any) -> Any:
        if packed_layout is None:
            return original(*args, **kwargs)
        return _forward_packed(self, packed_layout, **kwargs)

    base.forward = types.MethodType(forward, base)  # type: ignore[method-assign]
    base._algorist_packed = True  # type: ignore[assignment]


def _forward_packed(
    base: Any,
    layout: Layout,
    temperature: float,
    compute_entropy: bool,
    cast_head: bool,
    **_: Any,
) -> dict[str, Tensor]:
    with packed_attention(base.config.get_text_config(), layout), fast_linear():
        output = base.base_model(
            input_ids=layout.tokens_N[None],
            position_ids=layout.positions_N[None],
            attention_mask=None,
            use_cache=False,
        )
    hidden = output.last_hidden_state[0].index_select(0, layout.predict_M)
    head = base.get_output_embeddings()
    weight, bias = head.weight, getattr(head, "bias", None)
    context: AbstractContextManager[Any] = nullcontext()
    if cast_head:
        hidden, weight = hidden.float(), weight.float()
        context = torch.autocast(hidden.device.type, enabled=False)
    with context:
        found = completion_log_probs(
            hidden, weight, bias, layout.targets_M, temperature=temperature, compute_entropy=compute_entropy
        )
    return {name: value for name, value in found._asdict().items() if value is not None}


def unwrap(model: nn.Module) -> Any:
    """Return the transformers model inside DDP and PEFT wrappers."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    get_base = getattr(inner, "get_base_model", None)
    return get_base() if get_base is not None else inner


def recomputes(base: Any) -> bool:
    """Return whether the model is training with activation checkpointing."""
    name = "is_activation_checkpointing"  # its name since transformers 5
    name = name if hasattr(type(base), name) else "is_gradient_checkpointing"
    return bool(base.training and getattr(base, name, False))


def _refusal(model: nn.Module, base: Any) -> str | None:
    """Return why the packed forward does not apply to this model in its present state, or None."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    name = type(base).__name__
    if any("FullyShardedDataParallel" in k.__name__ or "FSDP" in k.__name__ for k in type(inner).__mro__):
        return "the model is sharded by FSDP"
    if any("DeepSpeed" in k.__name__ for k in type(model).__mro__):
        return "the model is wrapped by DeepSpeed"
    peft = getattr(inner, "peft_config", None) or {}
    if any(getattr(config, "is_prompt_learning", False) for config in peft.values()):
        return "the adapter prepends virtual tokens"
    if not hasattr(base, "config") or not hasattr(base, "get_output_embeddings"):
        return f"{name} is not a transformers causal language model"
    if not getattr(base, "_supports_attention_backend", False):
        return f"{name} does not take another attention function"
    if torch.is_grad_enabled() and recomputes(base):
        return "gradient checkpointing is on (the packed pass bounds memory by micro_batch_tokens instead)"
    config = base.config.get_text_config()
    odd = sorted(set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"})
    if odd:
        return f"{name} has layers of type {', '.join(odd)}"
    altered = altered_logits(config)
    if altered is not None:
        return f"{name} uses {altered}"
    return None


Rows = list[tuple[int, list[int], list[int]]]


def _rows(input_ids: Tensor, attention_mask: Tensor, width: int, keep: Tensor | None) -> Rows | str:
    """Return (row, prompt tokens, completion tokens) of the rows to compute, or why the masks do not fit."""
    ids, mask = input_ids.tolist(), attention_mask.tolist()
    wanted = keep.tolist() if keep is not None else [True] * len(ids)
    rows: Rows = []
    for row, (tokens, used) in enumerate(zip(ids, mask, strict=True)):
        split = len(tokens) - width
        length, size = int(sum(used[:split])), int(sum(used[split:]))
        if not wanted[row] or size == 0:
            continue
        if length == 0:
            return "a prompt is empty"
        if not all(used[split - length : split + size]):
            return "the attention mask is not one run of tokens per row"
        rows.append((row, tokens[split - length : split], tokens[split : split + size]))
    return rows


def _split(rows: Rows, budget: int | None) -> list[Rows]:
    """Split rows into parts of at most ``budget`` packed tokens, keeping groups together as far as possible."""
    if not rows:
        return []
    if budget is None:
        return [rows]
    order: dict[tuple[int, ...], Rows] = {}
    for row in rows:
        order.setdefault(tuple(row[1]), []).append(row)
    parts: list[Rows] = []
    used = budget
    for prompt, members in order.items():
        present = False
        for row in sorted(members, key=lambda r: len(r[2])):
            cost = len(row[2]) + (0 if present else len(prompt))
            if used + cost > budget and used > 0:
                parts.append([])
                used, cost = 0, len(row[2]) + len(prompt)
            parts[-1].append(row)
            used += cost
            present = True
    return parts


def _tokens(part: Rows) -> int:
    """Return the packed size of a part: each prompt once, every completion."""
    return sum(map(len, {tuple(prompt) for _, prompt, _ in part})) + sum(len(c) for _, _, c in part)


def _zero(base: nn.Module) -> Tensor:
    """Return a zero that depends on the smallest trainable parameter, for batches without any row to compute."""
    trainable = [parameter for parameter in base.parameters() if parameter.requires_grad]
    if not trainable:
        return torch.zeros(())
    return 0.0 * min(trainable, key=lambda p: p.numel()).float().sum()


__all__ = ["ATTENTION_NAME", "FastUpdate", "packed_forward", "unwrap"]
