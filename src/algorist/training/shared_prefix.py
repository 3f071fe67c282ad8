"""Attention of the packed row: a prompt attends to itself, a completion to its prompt and to itself.

It is plugged into transformers' attention interface, so that the model's own forward runs, with its adapters and hooks.
Each completion's attention has two parts, a rectangular one over its prompt and a causal one over itself, which are
merged by their log-sum-exp: no masks but for sliding windows, no copies of the prompt's keys. The backward kernels take the merged output and
log-sum-exp, with which the gradient of each part is exact. The kernels: torch's flash attention for sequences of unequal
length on GPUs of compute capability 8.0 and more in 16 bit; blocks of padded rows through the CPU's flash kernel and,
on GPUs, through the memory-efficient one; ``reference_attention`` elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from algorist.models.precision import HALF, on_gpu
from algorist.models.sharding import plain_class
from algorist.training.attention_kernels import (
    BackwardKernel,
    Edges,
    ForwardKernel,
    kernel_for,
    varlen_backward,
    varlen_forward,
)
from algorist.training.loop_seam import RECOMPUTE
from algorist.training.packed import Layout, NotPackable, SelfBlock, in_one_copy, input_on_host, mlp_in_tiles

ATTENTION_NAME = "algorist_shared_prefix"
SHORT_CONVOLUTIONS = ("Lfm2ShortConv",)
"""Modules that multiply their input by a gate, convolve it, and multiply it by another gate."""


class Cross(NamedTuple):
    """Completions of a group that attend to its prompt, and the part of it that they see: places in the packed row."""

    rest: slice | Tensor
    prompt: slice
    mask: Tensor | None


class _Row:
    """A layout and what the kernels need to know of it, made once for all layers."""

    def __init__(self, layout: Layout, window: int | None = None) -> None:
        self.layout, self.window = layout, window
        self._made: dict[Any, Any] = {}

    def within(self, window: int | None) -> _Row:
        """Return the row as layers with a window see it; itself where all of it lies within."""
        if window is None or self.layout.longest <= window:
            return self
        if window not in self._made:
            self._made[window] = _Row(self.layout, window)
        return self._made[window]  # type: ignore[no-any-return]

    @cached_property
    def crosses(self) -> list[Cross]:
        """Attentions of completions to their prompts; with a window only where a token sees one of the prompt's."""
        groups = [g for g in self.layout.groups if g.stop > g.middle]
        every = [Cross(slice(g.middle, g.stop), slice(g.start, g.middle), None) for g in groups]
        return every if self.window is None else [near for cross in every for near in self._near(cross)]

    def _near(self, cross: Cross) -> list[Cross]:
        window, begin, end = self.window or 0, cross.prompt.start, cross.prompt.stop
        position = self.layout.positions_N[cross.rest]
        rest = (position < end - begin - 1 + window).nonzero()[:, 0]
        first = max(0, end - begin - window + 1)
        times = torch.arange(first, end - begin, device=position.device)
        mask = _additive(times > position[rest, None] - window)
        return [Cross(rest + end, slice(begin + first, end), mask)] if len(rest) else []

    def band(self, width: int) -> Tensor | None:
        """Return the mask of rows that attend to themselves, or None where it is merely causal."""
        if self.window is None or width <= self.window:
            return None
        if width not in self._made:
            device = self.layout.tokens_N.device
            every = torch.ones(width, width, dtype=torch.bool, device=device)
            self._made[width] = _additive(every.tril().triu(1 - self.window))
        return self._made[width]  # type: ignore[no-any-return]

    @cached_property
    def own(self) -> Edges:
        """All prompts and completions as sequences of the packed row."""
        blocks = (*self.layout.prompts, *self.layout.completions)
        total, used = self.layout.tokens_N.shape[0], self.layout.used
        starts = torch.cat([block.index_nL[:, 0] for block in blocks]).sort().values
        # Filled on the device: a tensor made from a list would be a copy that the host waits for.
        ends = torch.cat([starts.new_full((1,), end) for end in ([used, total] if total > used else [used])])
        longest = max(block.index_nL.shape[1] for block in blocks)
        return Edges(torch.cat([starts, ends]).int(), max(longest, total - used))

    @cached_property
    def shared(self) -> tuple[tuple[slice | Tensor, Edges], tuple[slice | Tensor, Edges]] | None:
        """The completions of each group and the prompts that they share: places in the packed row, and edges."""
        groups = [g for g in self.layout.groups if g.stop > g.middle]
        if not groups:
            return None
        both = [(g.middle, g.stop) for g in groups], [(g.start, g.middle) for g in groups]
        sizes = [[stop - start for start, stop in spans] for spans in both]
        offsets = [torch.tensor([0, *lengths]).cumsum(0) for lengths in sizes]
        every = [torch.cat([torch.arange(*span) for span in spans]) for spans in both]
        moved = in_one_copy([*offsets, *every], self.layout.tokens_N.device)

        def place(which: int) -> tuple[slice | Tensor, Edges]:
            places = moved[2 + which] if len(groups) > 1 else slice(*both[which][0])
            return places, Edges(moved[which].int(), max(sizes[which]))

        return place(0), place(1)

    def convolve(self, x_NH: Tensor, conv: nn.Conv1d) -> Tensor:
        """Return a short causal convolution: a completion's first tokens are convolved with the last of their prompt."""
        weight_TH, size = conv.weight[:, 0].t().to(x_NH.dtype), conv.kernel_size[0]
        padded = F.pad(x_NH, (0, 0, 0, 1))  # the last row: before the sequence
        taps = [padded[self._before(size - 1 - tap)] * weight_TH[tap] for tap in range(size)]
        total = torch.stack(taps).sum(0)
        return total if conv.bias is None else total + conv.bias.to(x_NH.dtype)

    def _before(self, distance: int) -> Tensor:
        """Return for each packed token the place of the one ``distance`` before it in its sequence, N for none."""
        if -distance not in self._made:
            count = len(self.layout.tokens_N)
            places = torch.full_like(self.layout.tokens_N, count)
            for block in (*self.layout.prompts, *self.layout.completions):
                first, (start, length) = block.index_nL[:, :1], block.prompt_n2[..., None].unbind(1)
                back = block.index_nL - first - distance  # below 0: in the prompt
                source = torch.where(back >= 0, first + back, start + length + back)
                source = source.masked_fill(back < -length, count)
                places[block.packed_R] = source.view(-1)[block.real_R]
            self._made[-distance] = places
        return self._made[-distance]  # type: ignore[no-any-return]


def _additive(seen: Tensor) -> Tensor:
    return torch.zeros(1, 1, *seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))


_ROW: ContextVar[_Row | None] = ContextVar("algorist_packed_row", default=None)


@contextmanager
def packed_attention(model: Any, layout: Layout, *, sparing: bool = False) -> Iterator[None]:
    """Let ``model`` (or a part of it) run its forward on the packed row of ``layout``.

    Layers that are checkpointed one by one find the layout again when the backward pass recomputes them; ``sparing``: with the
    least memory.
    """
    config, row = model.config.get_text_config(), _Row(layout)
    for module in model.modules():
        if plain_class(module).__name__ in SHORT_CONVOLUTIONS and "forward" not in vars(module):
            module.forward = functools.partial(_short_convolution, module, module.forward)
    checkpointed = [m for m in model.modules() if hasattr(m, RECOMPUTE)]
    before = [getattr(module, RECOMPUTE) for module in checkpointed]
    for module, run in zip(checkpointed, before, strict=True):
        setattr(module, RECOMPUTE, _inside(config, row, run, module if sparing else None))
    try:
        with _entered(config, row):
            yield
    finally:
        for module, run in zip(checkpointed, before, strict=True):
            setattr(module, RECOMPUTE, run)


@contextmanager
def _entered(config: Any, row: _Row) -> Iterator[None]:
    previous, config._attn_implementation = config._attn_implementation, ATTENTION_NAME
    token = _ROW.set(row)
    try:
        yield
    finally:
        config._attn_implementation = previous
        _ROW.reset(token)


def _inside(config: Any, row: _Row, run: Callable[..., Any], sparing: nn.Module | None) -> Callable[..., Any]:
    """Return ``run(layer, …)`` with a layer that sees the row whenever it is called; ``sparing`` is the layer itself, or None."""
    tokens = row.layout.tokens_N.shape[0]

    def checkpoint(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def seeing(*inputs: Any, **named: Any) -> Any:
            with _entered(config, row), mlp_in_tiles(sparing, tokens):
                return layer(*inputs, **named)

        with input_on_host(args[0] if sparing is not None else None):
            return run(seeing, *args, **kwargs)

    return checkpoint


def _interface(
    module: nn.Module,
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
    row = _ROW.get()
    if row is None:
        raise NotPackable(f"attention '{ATTENTION_NAME}' works inside packed_attention() only")
    layout = row.layout
    if dropout:
        raise NotPackable(f"attention dropout is {dropout}")
    row = row.within(sliding_window)
    for name in ("softcap", "s_aux", "sinks", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotPackable(f"attention with {name}")
    if getattr(module, "is_causal", True) is False:
        raise NotPackable("attention that is not causal")
    if query.shape[0] != 1 or query.shape[2] != layout.tokens_N.shape[0]:
        raise NotPackable(
            f"attention input of shape {tuple(query.shape)} for {layout.tokens_N.shape[0]} packed tokens"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    # Under autocast the rotary embedding leaves queries and keys in float32 beside values in 16 bit. The CPU's flash kernel
    # goes backward in bfloat16 two to eight times as long as in float32.
    out_dtype = value.dtype
    dtype = torch.float32 if out_dtype in HALF and query.device.type == "cpu" else out_dtype
    query, key, value = (t.to(dtype) for t in (query, key, value))
    kernel = kernel_for(query, value)
    if kernel is None or (row.window is not None and on_gpu(query.device)):
        out = reference_attention(query, key, value, layout, scale, row.window)
    elif kernel == "varlen":
        out = _Varlen.apply(query, key, value, row, scale)
    else:
        out = _SharedPrefixAttention.apply(query, key, value, row, scale, *kernel)
    return out.to(out_dtype).transpose(1, 2), None


def _short_convolution(
    module: Any, original: Callable[..., Tensor], hidden_states: Tensor, **more: Any
) -> Tensor:
    """Forward of a gated short convolution that knows the packed row."""
    row = _ROW.get()
    if row is None:
        return original(hidden_states, **more)
    before, after, x = module.in_proj(hidden_states).chunk(3, dim=-1)
    out: Tensor = module.out_proj(after * row.convolve((before * x)[0], module.conv)[None])
    return out


AttentionInterface.register(ATTENTION_NAME, _interface)


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, window: int | None = None
) -> Tensor:
    """Attention of the packed row by plain differentiable operations and dense masks; any device.

    Args:
        query: (1, Hq, N, d).
        key: (1, Hk, N, d).
        value: (1, Hk, N, d).
        layout: The packed row.
        scale: Factor of the scores.
        window: The tokens that each one sees, itself included; None for all before it.

    Returns:
        (1, Hq, N, d).
    """
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    out = torch.zeros((*query.shape[:3], value.shape[-1]), dtype=value.dtype, device=query.device)
    for block in (*layout.prompts, *layout.completions):
        (start, length), width = block.prompt_n2.unbind(1), block.index_nL.shape[1]
        places = torch.arange(block.longest_prompt, device=out.device)
        at_prompt = start[:, None] + torch.minimum(places[None], length[:, None] - 1)
        index = torch.cat([at_prompt, block.index_nL], 1)  # (n, P + L)
        mask = torch.ones(width, index.shape[1], dtype=torch.bool, device=out.device).tril(len(places))
        mask = mask.repeat(len(index), 1, 1)  # (n, L, P + L)
        mask[:, :, : len(places)] &= (places[None] < length[:, None])[:, None]
        if window is not None:
            position = length[:, None] + torch.arange(width, device=out.device)  # (n, L)
            of_keys = torch.cat([places.expand(len(index), -1), position], 1)
            mask &= of_keys[:, None] > position[..., None] - window
        own, keys, values = (
            t[0][:, i].transpose(0, 1) for t, i in ((query, block.index_nL), (key, index), (value, index))
        )
        part = F.scaled_dot_product_attention(own, keys, values, attn_mask=mask[:, None], scale=scale)
        flat = part.transpose(0, 1).flatten(1, 2).index_select(1, block.real_R)
        out = out.index_copy(2, block.packed_R, flat[None])
    return out


# ---- sequences of unequal length: one call for all ------------------------------------------------------------------


class _Varlen(torch.autograd.Function):
    """Two calls per layer: every prompt and completion to itself, the completions of each group to their prompt."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, row: _Row, scale: float) -> Tensor:
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        out, lse = varlen_forward(q, k, v, row.own, row.own, True, scale)
        if row.shared is not None:
            (rest, ends), (prompts, prompt_ends) = row.shared
            cross, cross_lse = varlen_forward(
                q[rest], k[prompts], v[prompts], ends, prompt_ends, False, scale
            )
            own_lse = lse[:, rest]
            total = torch.logaddexp(own_lse, cross_lse)
            share = (own_lse - total).exp_().t()[..., None]
            out[rest] = torch.lerp(cross.float(), out[rest].float(), share).to(out.dtype)
            lse[:, rest] = total
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.row, ctx.scale = row, scale
        return out[None].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *inputs, out, lse = ctx.saved_tensors
        row, scale = ctx.row, ctx.scale
        grad, q, k, v = (t[0].transpose(0, 1) for t in (grads[0], *inputs))
        slopes = varlen_backward((grad, q, k, v, out, lse), row.own, row.own, True, scale)
        if row.shared is not None:
            (rest, ends), (prompts, prompt_ends) = row.shared
            tensors = grad[rest], q[rest], k[prompts], v[prompts], out[rest], lse[:, rest].contiguous()
            parts = varlen_backward(tensors, ends, prompt_ends, False, scale)
            for slope, at, part in zip(slopes, (rest, prompts, prompts), parts, strict=True):
                slope[at] += part
        return (*(slope[None].transpose(1, 2) for slope in slopes), None, None)


# ---- blocks of padded rows -----------------------------------------------------------------------------------------


class _SharedPrefixAttention(torch.autograd.Function):
    """Completions attend to their prompt in one call per group, and to themselves in blocks of rows of similar length."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        row: _Row,
        scale: float,
        kernel: ForwardKernel,
        kernel_backward: BackwardKernel,
    ) -> Tensor:
        layout = row.layout
        heads, size = query.shape[1], query.shape[2]
        out_NHd = query.new_empty((size, heads, value.shape[-1]))
        exact = torch.promote_types(query.dtype, torch.float32)
        lse_NH = torch.empty((size, heads), dtype=exact, device=query.device)
        out_NHd[layout.used :] = 0
        if row.window is not None:  # what is too far from the prompt sees none of it
            out_NHd.zero_()
            lse_NH.fill_(float("-inf"))
        inputs = tuple(t.transpose(1, 2)[0] for t in (query, key, value))
        for block in layout.prompts:
            own, own_lse = _attend_to_itself(kernel, inputs, block, row, scale)
            out_NHd.index_copy_(0, block.packed_R, own)
            lse_NH.index_copy_(0, block.packed_R, own_lse)
        for rest, prompt, mask in row.crosses:
            tensors = query[:, :, rest], key[:, :, prompt], value[:, :, prompt]
            part, part_lse = kernel(tensors, False, scale, mask)
            out_NHd[rest], lse_NH[rest] = part[0].transpose(0, 1), part_lse[0].t()
        for block in layout.completions:
            own, own_lse = _attend_to_itself(kernel, inputs, block, row, scale)
            cross_lse = lse_NH[block.packed_R]
            total = torch.logaddexp(own_lse, cross_lse)
            share = (own_lse - total).exp_()[..., None].to(own.dtype)
            out_NHd.index_copy_(0, block.packed_R, torch.lerp(out_NHd[block.packed_R], own, share))
            lse_NH.index_copy_(0, block.packed_R, total)
        ctx.save_for_backward(query, key, value, out_NHd, lse_NH)
        ctx.row, ctx.scale, ctx.kernel = row, scale, kernel_backward
        return out_NHd[None].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out_NHd, lse_NH = ctx.saved_tensors
        row, scale, kernel, grad_out = ctx.row, ctx.scale, ctx.kernel, grads[0]
        layout = row.layout
        slopes = tuple(t.new_empty((t.shape[2], t.shape[1], t.shape[3])) for t in (query, key, value))
        for slope in slopes:
            slope[0 if row.window is not None else layout.used :] = 0
        inputs = tuple(t.transpose(1, 2)[0] for t in (query, key, value))
        of_output = (grad_out.transpose(1, 2)[0], out_NHd, lse_NH)
        for block in layout.prompts:
            parts = _backward_of_itself(kernel, inputs, of_output, block, row, scale)
            for slope, part in zip(slopes, parts, strict=True):
                slope.index_copy_(0, block.packed_R, part)
        out, lse = out_NHd[None].transpose(1, 2), lse_NH[None].transpose(1, 2)
        for rest, prompt, mask in row.crosses:
            grad, own_query, own_out, own_lse = (t[:, :, rest] for t in (grad_out, query, out, lse))
            tensors = grad, own_query, key[:, :, prompt], value[:, :, prompt], own_out, own_lse
            parts = kernel(tensors, False, scale, mask)
            slopes[0][rest] = parts[0][0].transpose(0, 1)
            slopes[1][prompt] += parts[1][0].transpose(0, 1)
            slopes[2][prompt] += parts[2][0].transpose(0, 1)
        for block in layout.completions:
            q_part, k_part, v_part = _backward_of_itself(kernel, inputs, of_output, block, row, scale)
            slopes[0].index_add_(0, block.packed_R, q_part)
            slopes[1].index_copy_(0, block.packed_R, k_part)
            slopes[2].index_copy_(0, block.packed_R, v_part)
        return (*(slope[None].transpose(1, 2) for slope in slopes), None, None, None, None)


def _gather(tensor_Nx: Tensor, block: SelfBlock) -> Tensor:
    """(N, heads, …) → (n, heads, L, …) of the block's rows."""
    return tensor_Nx[block.index_nL].transpose(1, 2)


def _only_real(tensor: Tensor, block: SelfBlock) -> Tensor:
    """(n, heads, L, …) → (R, heads, …) without padding."""
    return tensor.transpose(1, 2).flatten(0, 1).index_select(0, block.real_R)


def _attend_to_itself(
    kernel: ForwardKernel, inputs: tuple[Tensor, ...], block: SelfBlock, row: _Row, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the causal attention of the block's rows (R, heads, d) and its log-sum-exp (R, heads)."""
    out, lse = kernel([_gather(t, block) for t in inputs], True, scale, row.band(block.index_nL.shape[1]))
    return _only_real(out, block), _only_real(lse, block)


def _backward_of_itself(
    kernel: BackwardKernel,
    inputs: tuple[Tensor, ...],
    of_output: tuple[Tensor, ...],
    block: SelfBlock,
    row: _Row,
    scale: float,
) -> list[Tensor]:
    """Return the gradients (R, heads, d) of query, key and value; ``given``: output's gradient, output, log-sum-exp."""
    grad_NHd, out_NHd, lse_NH = of_output
    grad = grad_NHd.new_zeros((block.index_nL.numel(), *grad_NHd.shape[1:]))
    grad.index_copy_(0, block.real_R, grad_NHd[block.packed_R])  # padded queries pass no gradient
    grad = grad.view(*block.index_nL.shape, *grad_NHd.shape[1:]).transpose(1, 2)
    parts = kernel(
        (grad, *(_gather(t, block) for t in (*inputs, out_NHd, lse_NH))),
        True,
        scale,
        row.band(block.index_nL.shape[1]),
    )
    return [_only_real(part, block) for part in parts]
