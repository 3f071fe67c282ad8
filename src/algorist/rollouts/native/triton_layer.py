"""A decoder layer of a decode step on CUDA, in six Triton kernels: each product with what comes before and after it.

The norm is taken while a product reads its input, and divides its sums; an adapter's first factor is a second product over the same
input. ``qkv`` ends with bias, norm of the heads, rotation and the write into the cache; gate and up end with the gated activation; the
other two add to the residual where it lies. Between them are the two kernels of ``triton_attention.py``. The twin is
``graph_tier._Body._layer``, from torch's products. Shapes: S slots, I inputs, N outputs of a product, R rank of its adapters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from algorist.rollouts.native.triton_attention import TritonAttention
from algorist.rollouts.native.weights import DecoderWeights, Layer, Matrix

FEW_SLOTS = 128
"""Slots they are meant for: beyond, a token is bound by its products, and those of torch's library are better ones."""
MOST_SLOTS = 0
"""Slots up to which they run: no card has measured them yet. ``benchmarks/gpu.py --sections decode`` compares ``FEW_SLOTS``."""
MOST_RANK = 64
"""Of all adapters of a product: each program takes the whole first factor."""
_ROWS = 64


@triton.jit  # type: ignore[misc]
def _product_kernel(  # type: ignore[no-untyped-def]
    x_ptr, norm_ptr, w_ptr, w2_ptr, bias_ptr, bias2_ptr, low_ptr, high_ptr, high2_ptr, out_ptr,
    head_norm_ptr, rotation_ptr, position_ptr, length_ptr, k_ptr, v_ptr,
    rows, width, columns, stride_w, stride_bias, stride_high, rank, stride_s, stride_k, query_scale, eps,
    PAIRED: tl.constexpr, ROTATED: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr, ADAPTED: tl.constexpr,
    RANK: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HEAD_NORMED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * M + tl.arange(0, M)
    live = m < rows
    row = m.to(tl.int64)[:, None]
    tile = tl.program_id(1)
    if ROTATED:  # a part of one head's pairs
        blocks: tl.constexpr = (HALF + N - 1) // N
        head = tile // blocks
        i = (tile % blocks) * N + tl.arange(0, N)
        real = i < HALF
        n = head * HALF + i
    else:
        n = tile * N + tl.arange(0, N)
        real = n < columns
    kind = w_ptr.dtype.element_ty
    weight = n.to(tl.int64)[:, None] * stride_w
    r = tl.arange(0, RANK)
    first = tl.zeros([M, N], tl.float32)
    second = tl.zeros([M, N], tl.float32)
    mid = tl.zeros([M, RANK], tl.float32)
    squares = tl.zeros([M], tl.float32)
    for begin in range(0, width, K):
        k = begin + tl.arange(0, K)
        inside = k < width
        x = tl.load(x_ptr + row * width + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        if NORMED:
            exact = x.to(tl.float32)
            squares += tl.sum(exact * exact, 1)
            x = exact * tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        x = x.to(kind)
        taken = real[:, None] & inside[None, :]
        w = tl.load(w_ptr + weight + k[None, :], mask=taken, other=0.0)
        first += tl.dot(x, tl.trans(w), input_precision="ieee")
        if PAIRED:
            w = tl.load(w2_ptr + weight + k[None, :], mask=taken, other=0.0)
            second += tl.dot(x, tl.trans(w), input_precision="ieee")
        if ADAPTED:
            low = tl.load(
                low_ptr + r[:, None] * width + k[None, :],
                mask=(r < rank)[:, None] & inside[None, :],
                other=0.0,
            )
            mid += tl.dot(x, tl.trans(low), input_precision="ieee")
    if NORMED:
        scale = (1.0 / tl.sqrt(squares / width + eps))[:, None]
        first *= scale
        second *= scale
        mid *= scale
    if ADAPTED:
        high = n.to(tl.int64)[:, None] * stride_high + r[None, :]
        taken = real[:, None] & (r < rank)[None, :]
        b = tl.load(high_ptr + high, mask=taken, other=0.0)
        first += tl.dot(mid.to(kind), tl.trans(b), input_precision="ieee")
        if PAIRED:
            b = tl.load(high2_ptr + high, mask=taken, other=0.0)
            second += tl.dot(mid.to(kind), tl.trans(b), input_precision="ieee")
    if BIASED:
        first += tl.load(bias_ptr + n * stride_bias, mask=real, other=0.0).to(tl.float32)[None, :]
        if PAIRED:
            second += tl.load(bias2_ptr + n * stride_bias, mask=real, other=0.0).to(tl.float32)[None, :]
    stored = live[:, None] & real[None, :]
    if not PAIRED:
        out = out_ptr + row * columns + n[None, :]
        first += tl.load(out, mask=stored, other=0.0).to(tl.float32)
        tl.store(out, first.to(out_ptr.dtype.element_ty), mask=stored)
    elif not ROTATED:
        gated = first / (1.0 + tl.exp(-first)) * second
        tl.store(out_ptr + row * columns + n[None, :], gated.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        time = tl.load(length_ptr + m, mask=live, other=0)[:, None]
        at = 2 * i[None, :]
        if head < HEADS + KV_HEADS:
            if HEAD_NORMED:
                of_row = tl.sum(first * first, 1) + tl.sum(second * second, 1)
                of_row = 1.0 / tl.sqrt(of_row / (2 * HALF) + eps)
                of_head = head_norm_ptr + head * 2 * HALF + 2 * i
                first *= of_row[:, None] * tl.load(of_head, mask=real, other=0.0)[None, :]
                second *= of_row[:, None] * tl.load(of_head + 1, mask=real, other=0.0)[None, :]
            position = tl.load(position_ptr + m, mask=live, other=0)[:, None]
            turn = rotation_ptr + (position * HALF + i[None, :]) * 2
            cos = tl.load(turn, mask=stored, other=0.0)
            sin = tl.load(turn + 1, mask=stored, other=0.0)
            first, second = first * cos - second * sin, first * sin + second * cos
            if head < HEADS:
                out = out_ptr + (row * HEADS + head) * 2 * HALF + at
                first *= query_scale
                second *= query_scale
            else:
                out = k_ptr + row * stride_s + (head - HEADS) * stride_k + time * 2 * HALF + at
        else:
            out = v_ptr + row * stride_s + (head - HEADS - KV_HEADS) * stride_k + time * 2 * HALF + at
        tl.store(out, first.to(out_ptr.dtype.element_ty), mask=stored)
        tl.store(out + 1, second.to(out_ptr.dtype.element_ty), mask=stored)


class TritonLayer:
    """The kernels of a layer, with the attention's; see ``graph_tier._Body._layer`` for the contract."""

    def __init__(self, attention: TritonAttention) -> None:
        self.attention = attention

    @staticmethod
    def covers(weights: DecoderWeights, slots: int) -> bool:
        """Whether the kernels take all layers, and are meant for so many rows."""
        matrices = [layer.matrices for layer in weights.layers]
        return slots <= MOST_SLOTS and all(
            of_layer and all(matrix.rank <= MOST_RANK for matrix in of_layer) for of_layer in matrices
        )

    def __call__(self, index: int, layer: Layer, x: Tensor) -> Tensor:
        """Return the residual ``x`` (S, H) after layer ``index``, in its own memory."""
        assert layer.matrices is not None
        qkv, output, gate, up, down = layer.matrices
        pairs = [qkv.outputs(lambda tensor, first=first: tensor[first::2]) for first in (0, 1)]  # type: ignore[misc]
        attention = self.attention
        self._product(x, layer.attention_norm, pairs, attention.q, index, layer.qk_norm_ND)
        self._product(attention.attend(index), None, [output], x)
        gated = x.new_empty(len(x), len(gate.weight), dtype=gate.weight.dtype)
        self._product(x, layer.mlp_norm, [gate, up], gated)
        self._product(gated, None, [down], x)
        return x

    def _product(
        self,
        x: Tensor,
        norm: Tensor | None,
        parts: list[Matrix],
        out: Tensor,
        index: int | None = None,
        head_norm: Tensor | None = None,
    ) -> None:
        (first, second), attention = (parts[0], parts[-1]), self.attention
        state, half = attention.state, attention.dim // 2
        rotated, index = index is not None, index or 0
        keys, values = state.keys[index], state.values[index]
        (columns, width), rank = first.weight.shape, first.rank
        n = 16 if columns < 4096 else 32
        if rotated:
            n = max(16, triton.next_power_of_2(half)) if head_norm is not None else 16
            tiles = (attention.heads + 2 * attention.kv_heads) * triton.cdiv(half, n)
        else:
            tiles = triton.cdiv(columns, n)
        rows = max(16, min(_ROWS, triton.next_power_of_2(len(x))))
        low, high = first.factors[0] if rank else (x, x)
        biases = [x if part.bias is None else part.bias for part in (first, second)]
        _product_kernel[(triton.cdiv(len(x), rows), tiles)](
            x,
            x if norm is None else norm,
            first.weight,
            second.weight,
            *biases,
            low,
            high,
            second.factors[0][1] if rank else x,
            out,
            x if head_norm is None else head_norm,
            state.rotation[index],
            state.position,
            state.length,
            keys,
            values,
            len(x),
            width,
            columns,
            first.weight.stride(0),
            biases[0].stride(0),
            high.stride(0),
            rank,
            keys.stride(0),
            keys.stride(1),
            state.query_scale,
            state.eps,
            PAIRED=len(parts) == 2,
            ROTATED=rotated,
            NORMED=norm is not None,
            BIASED=first.bias is not None,
            ADAPTED=rank > 0,
            RANK=triton.next_power_of_2(max(16, rank)),
            HEADS=attention.heads,
            KV_HEADS=attention.kv_heads,
            HALF=half,
            HEAD_NORMED=head_norm is not None,
            M=rows,
            N=n,
            K=64 if x.dtype != torch.float32 else 32,
            num_warps=4,
            num_stages=2 if rank else 3,
        )
