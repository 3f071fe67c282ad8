"""Groups of completions packed into one row of tokens: each prompt once, then its completions, no padding.

Linear layers, norms and the feed-forward see one row without padding or repeated prompts. Attention knows the layout:
a prompt attends to itself, a completion to its prompt and to itself. It is plugged into transformers' attention
interface, so that the model's own forward runs, with its adapters and hooks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from algorist.errors import EngineError
from algorist.training.batch import Batch
from algorist.training.linear import row_bucket

ATTENTION_NAME = "algorist_shared_prefix"
BLOCK_TOKENS = 2048
"""Rows of similar length are padded together in the attention to themselves, up to this many places."""


class NotCovered(EngineError):
    """The packed forward would not compute what the model computes; use the model's own pass."""


@dataclass(frozen=True)
class SelfBlock:
    """Prompts or completions that are padded together for the causal attention to themselves.

    ``index_nL`` are packed positions, ``real_R`` the places of the flattened (n·L,) that are no padding, ``packed_R`` their
    packed positions; ``prompt_n2`` says where each row's prompt starts and how long it is (0 for prompts themselves).
    """

    index_nL: Tensor
    real_R: Tensor
    packed_R: Tensor
    prompt_n2: Tensor
    longest_prompt: int


class Span(NamedTuple):
    """A row's packed tokens, and its prompt's."""

    first: int
    size: int
    prompt_start: int
    prompt_size: int


@dataclass(frozen=True)
class Group:
    """One prompt and its completions: packed tokens [start, middle) and [middle, stop)."""

    start: int
    middle: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Where everything is in the packed row.

    ``tokens_N`` and ``positions_N`` are the model's input, filled up behind ``used`` tokens on the CPU; ``predict_M`` are the
    packed positions whose hidden states predict ``targets_M``; ``scatter_M`` are those targets' places in the flattened
    (B, T) completions.
    """

    tokens_N: Tensor
    positions_N: Tensor
    used: int
    groups: tuple[Group, ...]
    prompts: tuple[SelfBlock, ...]
    completions: tuple[SelfBlock, ...]
    predict_M: Tensor
    targets_M: Tensor
    scatter_M: Tensor
    longest: int


def pack(batch: Batch, block_tokens: int = BLOCK_TOKENS) -> Layout:
    """Pack a batch whose completions of a prompt follow each other.

        prompt 0 | completion 0.0 | completion 0.1 | … | prompt 1 | completion 1.0 | …
                 └ the prompt's last token predicts the first token of each of its completions

    Args:
        batch: Completions and prompts, none of them empty.
        block_tokens: Places of one block in the attention of rows to themselves.
    """
    device = batch.mask.device
    tokens: list[int] = []
    positions: list[int] = []
    predict: list[int] = []
    targets: list[int] = []
    scatter: list[int] = []
    groups: list[Group] = []
    spans: list[Span] = []
    longest = 0
    for prompt, rows in itertools.groupby(range(len(batch)), key=lambda row: batch.prompt_of[row]):
        prompt_ids = batch.prompts[prompt]
        start, length = len(tokens), len(prompt_ids)
        tokens.extend(prompt_ids)
        positions.extend(range(length))
        middle = len(tokens)
        for row in rows:
            completion = batch.completions[row]
            first, size = len(tokens), len(completion)
            tokens.extend(completion[:-1])  # nothing is predicted from the last token
            positions.extend(range(length, length + size - 1))
            predict.append(middle - 1)
            predict.extend(range(first, first + size - 1))
            targets.extend(completion)
            scatter.extend(range(row * batch.width, row * batch.width + size))
            longest = max(longest, length + size)
            if size > 1:
                spans.append(Span(first, size - 1, start, length))
        groups.append(Group(start, middle, len(tokens)))
    used = len(tokens)
    fill = row_bucket(used) - used if device.type == "cpu" else 0

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return Layout(
        tensor(tokens + [0] * fill),
        tensor(positions + [0] * fill),
        used,
        tuple(groups),
        _blocks([Span(g.start, g.middle - g.start, 0, 0) for g in groups], block_tokens, device),
        _blocks(spans, block_tokens, device),
        tensor(predict),
        tensor(targets),
        tensor(scatter),
        longest,
    )


def _blocks(spans: list[Span], most: int, device: torch.device) -> tuple[SelfBlock, ...]:
    """Cut spans, shortest first, into blocks of at most ``most`` padded places (or one row)."""
    found: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.size):
        if not found or (len(found[-1]) + 1) * span.size > most:
            found.append([])
        found[-1].append(span)
    return tuple(_self_block(block, device) for block in found)


def _self_block(spans: list[Span], device: torch.device) -> SelfBlock:
    first_n, size_n, *prompt = torch.tensor(spans).unbind(1)
    offsets_L = torch.arange(int(size_n.max()))
    # Padding repeats the row's last token: a right-padded causal row never looks at it, and its output is dropped.
    index = first_n[:, None] + torch.minimum(offsets_L[None], size_n[:, None] - 1)
    real = (offsets_L[None] < size_n[:, None]).view(-1).nonzero()[:, 0]
    return SelfBlock(
        index.to(device),
        real.to(device),
        index.view(-1)[real].to(device),
        torch.stack(prompt, 1).to(device),
        int(prompt[1].max()),
    )


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
    for block in (*layout.prompts, *layout.completions):
        (start, length), width = block.prompt_n2.unbind(1), block.index_nL.shape[1]
        places = torch.arange(block.longest_prompt, device=out.device)
        at_prompt = start[:, None] + torch.minimum(places[None], length[:, None] - 1)
        index = torch.cat([at_prompt, block.index_nL], 1)  # (n, P + L)
        mask = torch.ones(width, index.shape[1], dtype=torch.bool, device=out.device).tril(len(places))
        mask = mask.repeat(len(index), 1, 1)  # (n, L, P + L)
        mask[:, :, : len(places)] &= (places[None] < length[:, None])[:, None]
        own, keys, values = (
            t[0][:, i].transpose(0, 1) for t, i in ((query, block.index_nL), (key, index), (value, index))
        )
        part = F.scaled_dot_product_attention(own, keys, values, attn_mask=mask[:, None], scale=scale)
        flat = part.transpose(0, 1).flatten(1, 2).index_select(1, block.real_R)
        out = out.index_copy(2, block.packed_R, flat[None])
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
        out_NHd = query.new_empty((size, heads, value.shape[-1]))
        lse_NH = torch.empty((size, heads), dtype=torch.float32)
        out_NHd[layout.used :] = 0
        inputs = tuple(t.transpose(1, 2)[0] for t in (query, key, value))
        for block in layout.prompts:
            own, own_lse = _attend_to_itself(inputs, block, scale)
            out_NHd.index_copy_(0, block.packed_R, own)
            lse_NH.index_copy_(0, block.packed_R, own_lse)
        for group in layout.groups:
            prompt, rest = slice(group.start, group.middle), slice(group.middle, group.stop)
            if group.stop > group.middle:
                part, part_lse = _flash(
                    query[:, :, rest], key[:, :, prompt], value[:, :, prompt], 0.0, False, scale=scale
                )
                out_NHd[rest], lse_NH[rest] = part[0].transpose(0, 1), part_lse[0].t()
        for block in layout.completions:
            own, own_lse = _attend_to_itself(inputs, block, scale)
            cross_lse = lse_NH[block.packed_R]
            total = torch.logaddexp(own_lse, cross_lse)
            share = (own_lse - total).exp_()[..., None].to(own.dtype)
            out_NHd.index_copy_(0, block.packed_R, torch.lerp(out_NHd[block.packed_R], own, share))
            lse_NH.index_copy_(0, block.packed_R, total)
        ctx.save_for_backward(query, key, value, out_NHd, lse_NH)
        ctx.layout, ctx.scale = layout, scale
        return out_NHd[None].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out_NHd, lse_NH = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        grad_out = grads[0]
        slopes = tuple(t.new_empty((t.shape[2], t.shape[1], t.shape[3])) for t in (query, key, value))
        for slope in slopes:
            slope[layout.used :] = 0
        inputs = tuple(t.transpose(1, 2)[0] for t in (query, key, value))
        given = (grad_out.transpose(1, 2)[0], out_NHd, lse_NH)
        for block in layout.prompts:
            for slope, part in zip(slopes, _backward_of_itself(inputs, given, block, scale), strict=True):
                slope.index_copy_(0, block.packed_R, part)
        out, lse = out_NHd[None].transpose(1, 2), lse_NH[None].transpose(1, 2)
        for group in layout.groups:
            prompt, rest = slice(group.start, group.middle), slice(group.middle, group.stop)
            if group.stop == group.middle:
                continue
            parts = _flash_backward(
                grad_out[:, :, rest],
                query[:, :, rest],
                key[:, :, prompt],
                value[:, :, prompt],
                out[:, :, rest],
                lse[:, :, rest],
                0.0,
                False,
                scale=scale,
            )
            slopes[0][rest] = parts[0][0].transpose(0, 1)
            slopes[1][prompt] += parts[1][0].transpose(0, 1)
            slopes[2][prompt] += parts[2][0].transpose(0, 1)
        for block in layout.completions:
            q_part, k_part, v_part = _backward_of_itself(inputs, given, block, scale)
            slopes[0].index_add_(0, block.packed_R, q_part)
            slopes[1].index_copy_(0, block.packed_R, k_part)
            slopes[2].index_copy_(0, block.packed_R, v_part)
        return (*(slope[None].transpose(1, 2) for slope in slopes), None, None)


def _gather(tensor_Nx: Tensor, block: SelfBlock) -> Tensor:
    """(N, heads, …) → (n, heads, L, …) of the block's rows."""
    return tensor_Nx[block.index_nL].transpose(1, 2)


def _only_real(tensor: Tensor, block: SelfBlock) -> Tensor:
    """(n, heads, L, …) → (R, heads, …) without padding."""
    return tensor.transpose(1, 2).flatten(0, 1).index_select(0, block.real_R)


def _attend_to_itself(inputs: tuple[Tensor, ...], block: SelfBlock, scale: float) -> tuple[Tensor, Tensor]:
    """Return the causal attention of the block's rows (R, heads, d) and its log-sum-exp (R, heads)."""
    out, lse = _flash(*(_gather(t, block) for t in inputs), 0.0, True, scale=scale)
    return _only_real(out, block), _only_real(lse, block)


def _backward_of_itself(
    inputs: tuple[Tensor, ...], given: tuple[Tensor, ...], block: SelfBlock, scale: float
) -> list[Tensor]:
    """Return the gradients (R, heads, d) of query, key and value; ``given``: output's gradient, output, log-sum-exp."""
    grad_NHd, out_NHd, lse_NH = given
    grad = torch.zeros((block.index_nL.numel(), *grad_NHd.shape[1:]), dtype=grad_NHd.dtype)
    grad.index_copy_(0, block.real_R, grad_NHd[block.packed_R])  # padded queries pass no gradient
    parts = _flash_backward(
        grad.view(*block.index_nL.shape, *grad_NHd.shape[1:]).transpose(1, 2),
        *(_gather(t, block) for t in (*inputs, out_NHd, lse_NH)),
        0.0,
        True,
        scale=scale,
    )
    return [_only_real(part, block) for part in parts]
