"""The end of a decode step on CUDA, in Triton: what follows the head.

Two kernels take the place of some forty: ``_mass_kernel`` reads the logits once, ``_take_kernel`` picks each row's
token (inverse of the cumulative distribution, one uniform number), stores it and moves the row on. The plain twin is
``graph_tier._Body._take``. Shapes: S slots, V vocabulary, C chunks of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from algorist.rollouts.base import SamplingParams
from algorist.rollouts.native.graph_buffers import FIELDS, Buffers

CHUNK = 2048
"""Entries of the vocabulary that one program reads."""
_NEXT, _TOKEN, _ALIVE, _END = (tl.constexpr(FIELDS.index(name)) for name in ("next", "token", "alive", "end"))
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-20)


@triton.jit  # type: ignore[misc]
def _mass_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    top_ptr,
    mass_ptr,
    pick_ptr,
    stride,
    size,
    ids,
    chunks,
    inverse_temperature,
    CHUNK: tl.constexpr,
    GREEDY: tl.constexpr,
):
    slot, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + slot * stride + v, mask=v < size, other=float("-inf")).to(tl.float32)
    x *= inverse_temperature
    top = tl.max(x, 0)
    least = tl.maximum(top, -1e30)  # a chunk of nothing but -inf has no mass
    tl.store(top_ptr + slot * chunks + chunk, top)
    mass = tl.exp(x - least)
    tl.store(mass_ptr + slot * chunks + chunk, tl.sum(mass, 0))
    # Ids beyond the tokenizer's count in the log-prob and are never picked.
    if GREEDY:
        pick = tl.max(tl.where(v < ids, x, float("-inf")), 0)
    else:
        pick = tl.sum(tl.where(v < ids, mass, 0.0), 0)
    tl.store(pick_ptr + slot * chunks + chunk, pick)


@triton.jit  # type: ignore[misc]
def _take_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    top_ptr,
    mass_ptr,
    pick_ptr,
    state_ptr,
    uniform_ptr,
    reply_ptr,
    stop_ptr,
    token_ptr,
    log_prob_ptr,
    stride,
    state_stride,
    size,
    ids,
    chunks,
    spare,
    inverse_temperature,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GREEDY: tl.constexpr,
    TURNS: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    state = state_ptr + slot
    alive, after = tl.load(state + _ALIVE * state_stride), tl.load(state + _NEXT * state_stride)
    at = tl.where(alive == 0, spare, after)
    c = tl.arange(0, CHUNKS)
    tops = tl.load(top_ptr + slot * chunks + c, mask=c < chunks, other=float("-inf"))
    top = tl.max(tops, 0)
    masses = tl.load(mass_ptr + slot * chunks + c, mask=c < chunks, other=0.0) * tl.exp(tops - top)
    picks = tl.load(pick_ptr + slot * chunks + c, mask=c < chunks, other=float("-inf") if GREEDY else 0.0)
    if GREEDY:
        chunk = tl.argmax(picks, 0)
    else:
        edges = tl.cumsum(picks * tl.exp(tops - top), 0)
        target = tl.load(uniform_ptr + at) * tl.max(edges, 0)
        chunk = tl.minimum(tl.sum((edges <= target).to(tl.int32), 0), chunks - 1)
        before = tl.max(tl.where(c < chunk, edges, 0.0), 0)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + slot * stride + v, mask=v < size, other=float("-inf")).to(tl.float32)
    x *= inverse_temperature
    allowed = tl.where(v < ids, x, float("-inf"))
    if GREEDY:
        inner = tl.argmax(allowed, 0)
    else:
        inner_edges = tl.cumsum(tl.exp(allowed - top), 0)
        rest = tl.minimum(target - before, tl.max(inner_edges, 0) * _BELOW_ONE)
        inner = tl.minimum(tl.sum((inner_edges <= rest).to(tl.int32), 0), CHUNK - 1)
    token = tl.minimum(chunk * CHUNK + inner, ids - 1).to(tl.int64)
    # The sum of all masses and not the largest edge: a NaN must stay one.
    log_prob = tl.sum(tl.where(v == token, x, 0.0), 0) - top - tl.log(tl.sum(masses, 0))
    done = 0
    if TURNS:
        reply = tl.load(reply_ptr + at)
        token = tl.where(reply < 0, token, reply)
        done = tl.where(reply < 0, tl.load(stop_ptr + token).to(tl.int32), 0)
    else:
        done = tl.load(stop_ptr + token).to(tl.int32)
    tl.store(token_ptr + at, token)
    tl.store(log_prob_ptr + at, log_prob)
    tl.store(state + _TOKEN * state_stride, token)
    for field in tl.static_range(_NEXT + 1):  # position, length, next
        place = state + field * state_stride
        tl.store(place, tl.load(place) + alive)
    ends = (done > 0) | (after + alive >= tl.load(state + _END * state_stride))
    tl.store(state + _ALIVE * state_stride, tl.where(ends, 0, alive))


class TritonTake:
    """Samples, stores, and lets rows that are finished stand still: ``_Body._take`` for plain and greedy sampling."""

    def __init__(self, buffers: Buffers, params: SamplingParams, turns: bool) -> None:
        self.buffers, self.params, self.turns = buffers, params, turns

    @staticmethod
    def covers(params: SamplingParams) -> bool:
        """Whether no filter takes part."""
        return not (params.top_k or params.top_p < 1 or params.min_p or params.min_new_tokens)

    def __call__(self, logits_SV: Tensor, state: Tensor) -> None:
        """Take the next token of each slot; ``state`` (9, S) holds ``FIELDS``."""
        (slots, size), buffers = logits_SV.shape, self.buffers
        chunks, scale = triton.cdiv(size, CHUNK), 1.0 / (self.params.temperature or 1.0)
        top_SC, mass_SC, pick_SC = torch.empty(3, slots, chunks, device=logits_SV.device).unbind(0)
        stride, ids, greedy = (
            logits_SV.stride(0),
            min(size, buffers.ids or size),
            self.params.temperature == 0,
        )
        _mass_kernel[(slots, chunks)](
            logits_SV,
            top_SC,
            mass_SC,
            pick_SC,
            stride,
            size,
            ids,
            chunks,
            scale,
            CHUNK=CHUNK,
            GREEDY=greedy,
            num_warps=8,
        )
        _take_kernel[(slots,)](
            logits_SV,
            top_SC,
            mass_SC,
            pick_SC,
            state,
            buffers.uniform,
            buffers.reply,
            buffers.is_stop,
            buffers.token,
            buffers.log_prob,
            stride,
            state.stride(0),
            size,
            ids,
            chunks,
            buffers.spare,
            scale,
            CHUNK=CHUNK,
            CHUNKS=triton.next_power_of_2(chunks),
            GREEDY=greedy,
            TURNS=self.turns,
            num_warps=8,
        )
