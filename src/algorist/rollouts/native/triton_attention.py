"""Attention of one decode step on CUDA, in Triton: rotation and cache write in one kernel, attention in two passes.

Every length is read on the device, so one CUDA graph serves all lengths. A sequence is a prompt with the rows that continue
it, or a row's own completion. ``_partial`` computes softmax(q · k) v over one piece of one sequence, in float32, for all the
rows of a group at once, so that a prompt's keys are read once per group; ``_merge`` joins the pieces by their log-sum-exp.
The plain twin is ``decode_attention.py``. Shapes: S slots, N sequences, H heads, K key-value heads, T tokens, D head dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from algorist.rollouts.native.decode_attention import StepState

PIECE = 256
"""Keys that one program reads."""
_KEYS = 64
_MOST_QUERIES = 128


@triton.jit  # type: ignore[misc]
def _rotate_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    norm_ptr,
    rotation_ptr,
    position_ptr,
    length_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    stride_s,
    stride_k,
    query_scale,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
):
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, HALF)
    half = DIM // 2
    inside = i < half
    first, second = 2 * i, 2 * i + 1
    source = qkv_ptr + (slot * (HEADS + 2 * KV_HEADS) + head) * DIM
    a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
    time = tl.load(length_ptr + slot)
    if head < HEADS + KV_HEADS:
        if NORMED:
            scale = 1.0 / tl.sqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / DIM + eps)
            a = a * scale * tl.load(norm_ptr + head * DIM + first, mask=inside, other=0.0)
            b = b * scale * tl.load(norm_ptr + head * DIM + second, mask=inside, other=0.0)
        turn = rotation_ptr + (tl.load(position_ptr + slot) * half + i) * 2
        cos = tl.load(turn, mask=inside, other=0.0)
        sin = tl.load(turn + 1, mask=inside, other=0.0)
        x, y = a * cos - b * sin, a * sin + b * cos
        if head < HEADS:
            target = q_ptr + (slot * HEADS + head) * DIM
            x, y = x * query_scale, y * query_scale
        else:
            target = k_ptr + slot * stride_s + (head - HEADS) * stride_k + time * DIM
        tl.store(target + first, x.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(target + second, y.to(q_ptr.dtype.element_ty), mask=inside)
    else:
        target = v_ptr + slot * stride_s + (head - HEADS - KV_HEADS) * stride_k + time * DIM
        tl.store(target + first, a.to(v_ptr.dtype.element_ty), mask=inside)
        tl.store(target + second, b.to(v_ptr.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[misc]
def _partial_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    length_ptr,
    position_ptr,
    member_ptr,
    out_ptr,
    lse_ptr,
    stride_n,
    stride_k,
    members,
    written,
    first_piece,
    pieces,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCKS: tl.constexpr,
    M: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    OWN: tl.constexpr,
    WINDOW: tl.constexpr,
):
    sequence = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block, head, piece = tl.program_id(0) % BLOCKS, tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr + sequence) + written
    begin = piece * SPAN
    if begin >= length:
        return
    m = block * M + tl.arange(0, M)
    member = m // QUERIES
    if OWN:
        slot = tl.where(member < 1, sequence, -1)
    else:
        slot = tl.load(member_ptr + sequence * members + member, mask=member < members, other=-1)
    if tl.max(slot, 0) < 0:
        return
    live = slot >= 0
    row = slot.to(tl.int64) * HEADS + head * QUERIES + m % QUERIES
    d = tl.arange(0, D)
    wide = d < DIM
    q = tl.load(q_ptr + row[:, None] * DIM + d[None, :], mask=live[:, None] & wide[None, :], other=0.0)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, D], tl.float32)
    base = sequence * stride_n + head * stride_k
    if WINDOW:
        newest = tl.load(position_ptr + slot, mask=live, other=0)
    for at in range(begin, tl.minimum(begin + SPAN, length), KEYS):
        n = at + tl.arange(0, KEYS)
        seen = n < length
        place = base + n[:, None] * DIM + d[None, :]
        inside = seen[:, None] & wide[None, :]
        k = tl.load(k_ptr + place, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(seen[None, :], scores, float("-inf"))
        if WINDOW:
            # A finite floor: of a piece that lies before the window nothing is -inf - -inf, and its weight in the end is 0.
            scores = tl.where(n[None, :] > newest[:, None] - WINDOW, scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        weight = tl.exp(scores - higher[:, None])
        before = tl.exp(top - higher)
        total = total * before + tl.sum(weight, 1)
        v = tl.load(v_ptr + place, mask=inside, other=0.0)
        mixed = mixed * before[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = higher
    target = row * pieces + first_piece + piece
    tl.store(lse_ptr + target, top + tl.log(total), mask=live)
    tl.store(
        out_ptr + target[:, None] * DIM + d[None, :],
        mixed / total[:, None],
        mask=live[:, None] & wide[None, :],
    )


@triton.jit  # type: ignore[misc]
def _merge_kernel(  # type: ignore[no-untyped-def]
    part_ptr,
    lse_ptr,
    out_ptr,
    length_ptr,
    place_ptr,
    prompt_length_ptr,
    prompt_pieces,
    pieces,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    PIECES: tl.constexpr,
    STRIP: tl.constexpr,
    SPAN: tl.constexpr,
):
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(place_ptr + slot)
    prompt = tl.load(prompt_length_ptr + place, mask=place >= 0, other=0)
    own = tl.load(length_ptr + slot) + 1
    base = (slot * HEADS + head) * pieces
    w = tl.arange(0, PIECES)
    inside = ((w < prompt_pieces) & (w * SPAN < prompt)) | (
        (w >= prompt_pieces) & (w < pieces) & ((w - prompt_pieces) * SPAN < own)
    )
    lse = tl.load(lse_ptr + base + w, mask=inside, other=float("-inf"))
    top = tl.max(lse, 0)
    total = tl.sum(tl.exp(lse - top), 0)
    d = tl.arange(0, D)
    wide = d < DIM
    out = tl.zeros([D], tl.float32)
    for first in range(0, PIECES, STRIP):
        s = first + tl.arange(0, STRIP)
        used = ((s < prompt_pieces) & (s * SPAN < prompt)) | (
            (s >= prompt_pieces) & (s < pieces) & ((s - prompt_pieces) * SPAN < own)
        )
        weight = tl.exp(tl.load(lse_ptr + base + s, mask=used, other=float("-inf")) - top)
        part = tl.load(
            part_ptr + (base + s)[:, None] * DIM + d[None, :], mask=used[:, None] & wide[None, :], other=0.0
        )
        out += tl.sum(part * weight[:, None], 0)
    tl.store(out_ptr + (slot * HEADS + head) * DIM + d, (out / total).to(out_ptr.dtype.element_ty), mask=wide)


class TritonAttention:
    """The kernels with their work space, for the state of one slot size; see ``PlainAttention`` for the contract."""

    name = "Triton"

    def __init__(self, state: StepState, heads: int) -> None:
        self.state = state
        keys, prompts = state.keys[0], state.prompt_keys[0]
        slots, self.kv_heads, times, self.dim = keys.shape
        self.slots, self.heads, self.queries = slots, heads, heads // self.kv_heads
        self.prompt_pieces = -(-prompts.shape[2] // PIECE)
        self.pieces = self.prompt_pieces + -(-times // PIECE)
        self._q = keys.new_empty(slots, heads, self.dim)
        self._out = keys.new_empty(slots, heads * self.dim)
        # Zeros: a slot that is no longer a member may read pieces that nothing wrote.
        self._part = torch.zeros(slots, heads, self.pieces, self.dim, device=keys.device)
        self._lse = torch.zeros(slots, heads, self.pieces, device=keys.device)
        self._width = max(16, triton.next_power_of_2(self.dim))

    def step(self, index: int, qkv_SND: Tensor, norm_ND: Tensor | None) -> Tensor:
        """Rotate, store the new keys and values of layer ``index``, attend; return (S, H · D)."""
        state, keys, values = self.state, self.state.keys[index], self.state.values[index]
        assert keys.stride() == values.stride() and keys.stride(2) == self.dim and qkv_SND.is_contiguous()
        _rotate_kernel[(self.slots, self.heads + 2 * self.kv_heads)](
            qkv_SND,
            qkv_SND if norm_ND is None else norm_ND,
            state.rotation[index],
            state.position,
            state.length,
            self._q,
            keys,
            values,
            keys.stride(0),
            keys.stride(1),
            state.query_scale,
            state.eps,
            HEADS=self.heads,
            KV_HEADS=self.kv_heads,
            DIM=self.dim,
            HALF=triton.next_power_of_2(self.dim // 2),
            NORMED=norm_ND is not None,
            num_warps=1,
        )
        prompts = state.prompt_keys[index], state.prompt_values[index]
        self._partial(*prompts, state.prompt_length, state.position, state.window[index], own=False)
        # In a completion of its own, a row's newest token lies where its length says.
        self._partial(keys, values, state.length, state.length, state.window[index], own=True)
        _merge_kernel[(self.slots, self.heads)](
            self._part,
            self._lse,
            self._out,
            state.length,
            state.place,
            state.prompt_length,
            self.prompt_pieces,
            self.pieces,
            HEADS=self.heads,
            DIM=self.dim,
            D=self._width,
            PIECES=triton.next_power_of_2(self.pieces),
            STRIP=min(16, triton.next_power_of_2(self.pieces)),
            SPAN=PIECE,
            num_warps=2,
        )
        return self._out

    def _partial(
        self, keys: Tensor, values: Tensor, length: Tensor, newest: Tensor, window: int, *, own: bool
    ) -> None:
        """Every piece of every sequence: prompts with the rows that continue them, or each row with itself."""
        sequences, members = keys.shape[0], 1 if own else self.state.member.shape[1]
        # Shared memory holds the queries, and keys and values of each stage: 99 KB on the smaller cards. What has more than 256
        # bytes a row, or products in float32 (both operands lie there, every product is code), is taken in small pieces.
        large = keys.dtype == torch.float32 or self._width * keys.itemsize > 256
        most = _MOST_QUERIES // 4 if large else _MOST_QUERIES
        rows = max(16, triton.next_power_of_2(min(members * self.queries, most)))
        blocks = -(-members * self.queries // rows)
        first, pieces = (
            (self.prompt_pieces, self.pieces - self.prompt_pieces) if own else (0, self.prompt_pieces)
        )
        _partial_kernel[(sequences * blocks, self.kv_heads, pieces)](
            self._q,
            keys,
            values,
            length,
            newest,
            self.state.member,
            self._part,
            self._lse,
            keys.stride(0),
            keys.stride(1),
            members,
            int(own),
            first,
            self.pieces,
            HEADS=self.heads,
            QUERIES=self.queries,
            DIM=self.dim,
            D=self._width,
            BLOCKS=blocks,
            M=rows,
            KEYS=16 if large else _KEYS if rows <= 64 or self._width <= 64 else _KEYS // 2,
            SPAN=PIECE,
            OWN=own,
            WINDOW=window,
            num_warps=4 if rows <= 64 else 8,
            num_stages=1 if large else 3,
        )
