"""Groups of completions packed into one row of tokens: each prompt once, then its completions, no padding.

Linear layers, norms and the feed-forward see one row without padding or repeated prompts. Attention knows the layout:
a prompt attends to itself, a completion to its prompt and to itself. It is plugged into transformers' attention
interface, so that the model's own forward runs, with its adapters and hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from algorist.errors import EngineError

ATTENTION_NAME = "algorist_shared_prefix"
ROWS_PER_PASS = 4
"""Completions of similar length that are padded together in the attention to themselves."""


class NotCovered(EngineError):
    """The packed forward would not compute what the model computes; use the model's own pass."""


@dataclass(frozen=True)
class SelfBlock:
    """Completions of one group that are padded together: packed index (n, L) and what is real in it (n·L,)."""

    index_nL: Tensor
    real: Tensor


@dataclass(frozen=True)
class Group:
    """One prompt and its completions: packed tokens [start, middle) and [middle, stop)."""

    start: int
    middle: int
    stop: int
    blocks: tuple[SelfBlock, ...]


@dataclass(frozen=True)
class Layout:
    """Where everything is in the packed row.

    ``tokens_N`` and ``positions_N`` are the model's input; ``predict_M`` are the packed positions whose hidden states
    predict ``targets_M``; ``scatter_M`` are those targets' places in the flattened (B, T) completions.
    """

    tokens_N: Tensor
    positions_N: Tensor
    groups: tuple[Group, ...]
    predict_M: Tensor
    targets_M: Tensor
    scatter_M: Tensor
    longest: int


def pack(
    prompts: list[list[int]],
    completions: list[list[int]],
    rows: list[int],
    width: int,
    device: torch.device,
    rows_per_pass: int = ROWS_PER_PASS,
) -> Layout:
    """Pack rows that share prompts.

    Args:
        prompts: Prompt tokens of each row, never empty.
        completions: Completion tokens of each row, never empty.
        rows: Row number in the batch of each entry.
        width: Columns T of the batch's completions.
        device: Where the layout's tensors go.
        rows_per_pass: Completions padded together in the attention.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for entry, prompt in enumerate(prompts):
        members.setdefault(tuple(prompt), []).append(entry)
    tokens: list[int] = []
    positions: list[int] = []
    predict: list[int] = []
    targets: list[int] = []
    scatter: list[int] = []
    groups: list[Group] = []
    longest = 0
    for prompt_key, entries in members.items():
        start, length = len(tokens), len(prompt_key)
        tokens.extend(prompt_key)
        positions.extend(range(length))
        middle = len(tokens)
        spans: list[tuple[int, int]] = []
        for entry in sorted(entries, key=lambda e: len(completions[e])):
            completion = completions[entry]
            first, size = len(tokens), len(completion)
            tokens.extend(completion[:-1])  # nothing is predicted from the last token
            positions.extend(range(length, length + size - 1))
            predict.append(middle - 1)
            predict.extend(range(first, first + size - 1))
            targets.extend(completion)
            scatter.extend(range(rows[entry] * width, rows[entry] * width + size))
            longest = max(longest, length + size)
            if size > 1:
                spans.append((first, size - 1))
        blocks = tuple(
            _self_block(spans[i : i + rows_per_pass], device) for i in range(0, len(spans), rows_per_pass)
        )
        groups.append(Group(start, middle, len(tokens), blocks))

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return Layout(
        tensor(tokens),
        tensor(positions),
        tuple(groups),
        tensor(predict),
        tensor(targets),
        tensor(scatter),
        longest,
    )


def _self_block(spans: list[tuple[int, int]], device: torch.device) -> SelfBlock:
    width = max(size for _, size in spans)
    offsets = torch.arange(width)
    first = torch.tensor([start for start, _ in spans])[:, None]
    sizes = torch.tensor([size for _, size in spans])[:, None]
    # Padding repeats the row's last token: a right-padded causal row never looks at it, and its output is dropped.
    index = first + torch.minimum(offsets[None], sizes - 1)
    return SelfBlock(index.to(device), (offsets[None] < sizes).to(device))


_LAYOUT: ContextVar[Layout | None] = ContextVar("algorist_packed_layout", default=None)


@contextmanager
def packed_attention(config: Any, layout: Layout) -> Iterator[None]:
    """Let the model of ``config`` run its forward on the packed row of ``layout``."""
    previous = config._attn_implementation
    token = _LAYOUT.set(layout)
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = previous
        _LAYOUT.reset(token)


def _interface(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' interface: (1, heads, N, d) in, (1, N, heads, d) out."""
    layout = _LAYOUT.get()
    if layout is None:
        raise NotCovered(f"attention '{ATTENTION_NAME}' works inside packed_attention() only")
    if dropout:
        raise NotCovered(f"attention dropout is {dropout}")
    if sliding_window is not None and layout.longest > sliding_window:
        raise NotCovered(
            f"sequences of {layout.longest} tokens do not fit the sliding window of {sliding_window}"
        )
    for name in ("softcap", "s_aux", "sinks", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotCovered(f"attention with {name}")
    if getattr(module, "is_causal", True) is False:
        raise NotCovered("attention that is not causal")
    if query.shape[0] != 1 or query.shape[2] != layout.tokens_N.shape[0]:
        raise NotCovered(
            f"attention input of shape {tuple(query.shape)} for {layout.tokens_N.shape[0]} packed tokens"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        out: Tensor = _SharedPrefixAttention.apply(query, key, value, layout, scale)
    else:
        out = reference_attention(query, key, value, layout, scale)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAME, _interface)


def reference_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """Attention of the packed row by plain differentiable operations; any device.

    Args:
        query: (1, Hq, N, d).
        key: (1, Hk, N, d).
        value: (1, Hk, N, d).
        layout: The packed row.
        scale: Factor of the scores.

    Returns:
        (1, Hq, N, d).
    """
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    out = torch.zeros((*query.shape[:3], value.shape[-1]), dtype=query.dtype, device=query.device)
    for group in layout.groups:
        prompt = slice(group.start, group.middle)
        part = F.scaled_dot_product_attention(
            query[:, :, prompt], key[:, :, prompt], value[:, :, prompt], is_causal=True, scale=scale
        )
        out = out.index_copy(2, torch.arange(group.start, group.middle, device=out.device), part)
        for block in group.blocks:
            rows, width = block.index_nL.shape
            own_k, own_v = (t[0][:, block.index_nL].transpose(0, 1) for t in (key, value))
            own_q = query[0][:, block.index_nL].transpose(0, 1)
            keys = torch.cat([key[:, :, prompt].expand(rows, -1, -1, -1), own_k], 2)
            values = torch.cat([value[:, :, prompt].expand(rows, -1, -1, -1), own_v], 2)
            length = group.middle - group.start
            mask = torch.ones(width, length + width, dtype=torch.bool, device=out.device).tril(length)
            part = F.scaled_dot_product_attention(own_q, keys, values, attn_mask=mask, scale=scale)
            flat = part.transpose(0, 1).reshape(1, query.shape[1], rows * width, -1)
            chosen = block.real.reshape(-1)
            out = out.index_copy(2, block.index_nL.reshape(-1)[chosen], flat[:, :, chosen])
    return out


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _SharedPrefixAttention(torch.autograd.Function):
    """The same on the CPU without masks or copies of the prompt's keys.

    Completions attend to the prompt in one rectangular call and to themselves in causal calls; the two parts are
    merged by their log-sum-exp. The backward calls take the merged output and log-sum-exp, with which the flash
    backward of each part is exact.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        heads, size = query.shape[1], query.shape[2]
        out = query.new_empty((1, size, heads, value.shape[-1])).transpose(1, 2)
        lse = torch.empty((1, size, heads), dtype=torch.float32).transpose(1, 2)
        for group in layout.groups:
            prompt, rest = slice(group.start, group.middle), slice(group.middle, group.stop)
            k_prompt, v_prompt = key[:, :, prompt], value[:, :, prompt]
            out[:, :, prompt], lse[:, :, prompt] = _flash(
                query[:, :, prompt], k_prompt, v_prompt, 0.0, True, scale=scale
            )
            if group.stop == group.middle:
                continue
            out[:, :, rest], lse[:, :, rest] = _flash(
                query[:, :, rest], k_prompt, v_prompt, 0.0, False, scale=scale
            )
            for block in group.blocks:
                q_b, k_b, v_b = (_gather(t, block) for t in (query, key, value))
                part, part_lse = _flash(q_b, k_b, v_b, 0.0, True, scale=scale)
                index = block.index_nL[block.real]
                own = part.transpose(1, 2)[block.real]  # (real, heads, d)
                own_lse = part_lse.transpose(1, 2)[block.real]
                cross_lse = lse[0, :, index].t()
                total = torch.logaddexp(own_lse, cross_lse)
                cross = out[0, :, index].transpose(0, 1)
                merged = torch.lerp(cross, own, (own_lse - total).exp()[..., None].to(own.dtype))
                out.transpose(1, 2)[0].index_copy_(0, index, merged)
                lse.transpose(1, 2)[0].index_copy_(0, index, total)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        grad_out = grads[0]
        grad_q, grad_k, grad_v = (
            t.new_empty((1, t.shape[2], t.shape[1], t.shape[3])).transpose(1, 2) for t in (query, key, value)
        )
        for group in layout.groups:
            prompt, rest = slice(group.start, group.middle), slice(group.middle, group.stop)
            k_prompt, v_prompt = key[:, :, prompt], value[:, :, prompt]
            q_part, grad_k[:, :, prompt], grad_v[:, :, prompt] = _flash_backward(
                grad_out[:, :, prompt],
                query[:, :, prompt],
                k_prompt,
                v_prompt,
                out[:, :, prompt],
                lse[:, :, prompt],
                0.0,
                True,
                scale=scale,
            )
            grad_q[:, :, prompt] = q_part
            if group.stop == group.middle:
                continue
            q_part, k_part, v_part = _flash_backward(
                grad_out[:, :, rest],
                query[:, :, rest],
                k_prompt,
                v_prompt,
                out[:, :, rest],
                lse[:, :, rest],
                0.0,
                False,
                scale=scale,
            )
            grad_q[:, :, rest] = q_part
            grad_k[:, :, prompt] += k_part
            grad_v[:, :, prompt] += v_part
            for block in group.blocks:
                pad = ~block.real
                g_b = _gather(grad_out, block).transpose(1, 2)
                g_b[pad] = 0  # padded queries pass no gradient
                q_b, k_b, v_b, out_b = (_gather(t, block) for t in (query, key, value, out))
                lse_b = lse.transpose(1, 2)[0][block.index_nL].transpose(1, 2)
                parts = _flash_backward(
                    g_b.transpose(1, 2), q_b, k_b, v_b, out_b, lse_b, 0.0, True, scale=scale
                )
                index = block.index_nL[block.real]
                grad_q.transpose(1, 2)[0].index_add_(0, index, parts[0].transpose(1, 2)[block.real])
                for target, part in ((grad_k, parts[1]), (grad_v, parts[2])):
                    target.transpose(1, 2)[0].index_copy_(0, index, part.transpose(1, 2)[block.real])
        return grad_q, grad_k, grad_v, None, None


def _gather(tensor: Tensor, block: SelfBlock) -> Tensor:
    """(1, heads, N, d) → (n, heads, L, d) of the block's rows."""
    return tensor.transpose(1, 2)[0][block.index_nL].transpose(1, 2)
