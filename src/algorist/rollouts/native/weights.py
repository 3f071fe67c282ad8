"""Reads the weights of a Hugging Face decoder for the hand-written forward, by its description (``families.py``)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorist.models.precision import compute_dtype, weight_dtype
from algorist.models.products import Linear, LinearAdd, fixed_linear, why_no_triton
from algorist.models.sharding import plain_class
from algorist.rollouts.native.families import (
    Description,
    LayerModules,
    NotCovered,
    Rotation,
    attention_inputs,
    describe,
    mlp_inputs,
    read_rotation,
)


@dataclass(slots=True)
class Layer:
    """One decoder layer, ready to run. ``qkv`` gives queries, keys and values (S, N, D), ``gate_up`` gate and up.

    ``output_add`` and ``down_add`` hold the norms that come after attention and MLP; a norm that comes before is None where
    the layer has none. ``rotation`` is a place in the decoder's ``rotations``; ``window`` counts the tokens that are seen.
    """

    attention_norm: Tensor | None
    qkv: Linear
    qk_norm_ND: Tensor | None
    output_add: LinearAdd
    mlp_norm: Tensor | None
    gate_up: Callable[[Tensor], Sequence[Tensor]]
    down_add: LinearAdd
    rotation: int
    window: int | None


@dataclass(slots=True)
class DecoderWeights:
    """A whole decoder.

    ``dtype`` is the type of the products; the stream between the layers has the embedding's, as under autocast. The head
    dimensions of queries and keys come as pairs to rotate. ``query_scale`` is the factor of the scores that the weights do
    not hold yet.
    """

    layers: list[Layer]
    embedding_VH: Tensor
    embedding_scale: float
    final_norm: Tensor
    head: Linear
    rotations: list[Rotation]
    gated: Callable[[Tensor, Tensor], Tensor]
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    query_scale: float


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A linear layer: weight and bias in the products' type, and the factors (A, B) of adapters that are not merged."""

    weight: Tensor
    bias: Tensor | None
    factors: tuple[tuple[Tensor, Tensor], ...] = ()

    def outputs(self, change: Callable[[Tensor], Tensor]) -> _Matrix:
        """Return the layer with its outputs changed: ``change`` reorders, selects or scales what lies along the first dimension."""
        factors = tuple((first, change(second)) for first, second in self.factors)
        return _Matrix(change(self.weight), None if self.bias is None else change(self.bias), factors)

    def split(self, sizes: Sequence[int]) -> list[_Matrix]:
        """Return the layers that one layer joins."""

        def part(begin: int, end: int) -> _Matrix:
            return self.outputs(lambda tensor: tensor[begin:end])

        return [part(*pair) for pair in itertools.pairwise([0, *itertools.accumulate(sizes)])]

    def _fixed(self, reading: _Reading) -> tuple[Linear, LinearAdd]:
        bias = None if self.bias is None else reading.keep(self.bias)
        return fixed_linear(reading.keep(self.weight), bias, reading.rows)

    def linear(self, reading: _Reading) -> Linear:
        """Return x → x Wᵀ + b."""
        plain = self._fixed(reading)[0]
        factors = [(reading.keep(first), reading.keep(second)) for first, second in self.factors]
        return (lambda x: _low_rank(plain(x), x, factors)) if factors else plain

    def linear_add(self, reading: _Reading, stream: torch.dtype) -> LinearAdd:
        """Return (x, r) → r + x Wᵀ + b for a residual of type ``stream``, which may be overwritten."""
        if stream != self.weight.dtype:
            return _add_to_float32(self, reading) or _after(self.linear(reading))
        add = self._fixed(reading)[1]
        factors = [(reading.keep(first), reading.keep(second)) for first, second in self.factors]
        return (lambda x, residual: _low_rank(add(x, residual), x, factors)) if factors else add


def _after(product: Linear) -> LinearAdd:
    return lambda x, residual: residual + product(x)


def _add_to_float32(matrix: _Matrix, reading: _Reading) -> LinearAdd | None:
    """Return (x, r) → r + x Wᵀ for 16-bit products and a float32 residual: on CUDA the product's kernel adds."""
    if matrix.weight.device.type != "cuda" or matrix.bias is not None or matrix.factors:
        return None
    turned = reading.keep(matrix.weight).t()
    return lambda x, residual: torch.addmm(residual, x, turned, out_dtype=torch.float32, out=residual)


def _low_rank(product: Tensor, x: Tensor, factors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    for first, second in factors:
        product.addmm_(F.linear(x, first), second.t())
    return product


def _each(parts: Sequence[_Matrix], reading: _Reading) -> Callable[[Tensor], list[Tensor]]:
    """Return x → the output of each layer; the first factors of all their adapters are one product."""
    plain = [part._fixed(reading)[0] for part in parts]
    firsts = [first for part in parts for first, _ in part.factors]
    if not firsts:
        return lambda x: [product(x) for product in plain]
    first, ranks = reading.keep(torch.cat(firsts)), [len(first) for first in firsts]
    seconds = [[reading.keep(second).t() for _, second in part.factors] for part in parts]

    def run(x: Tensor) -> list[Tensor]:
        low, outputs = iter(F.linear(x, first).split(ranks, -1)), [product(x) for product in plain]
        for output, of_part in zip(outputs, seconds, strict=True):
            for second in of_part:
                output.addmm_(next(low), second)
        return outputs

    return run


@dataclass(frozen=True, slots=True)
class _Reading:
    """Options for reading weights: products' type, adapters merged or not, gate and up joined or read in place.

    ``keep`` gets every tensor that the decoder will read and returns the one to read.
    """

    description: Description
    dtype: torch.dtype
    merged: bool
    copied: bool
    rows: int
    keep: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def norm(self, module: Any, factor: float = 1.0) -> Tensor | None:
        """Return the weights of a norm; they are added to and scaled in float32. None for none."""
        if module is None:
            return None
        weight, offset = module.weight.detach(), self.description.family.norm_offset
        return self.keep(weight if (offset, factor) == (0.0, 1.0) else (weight.float() + offset) * factor)

    def added(self, linear: Any, norm: Any) -> LinearAdd:
        """Return (x, r) → r + what the layer adds to a residual, which may be overwritten; ``norm`` is that of the sum's part."""
        d, matrix = self.description, self.matrix(linear)
        if norm is None and d.residual_scale == 1.0:
            return matrix.linear_add(self, d.decoder.embed_tokens.weight.dtype)
        product = matrix.linear(self)
        if norm is None:
            return lambda x, residual: residual.add_(product(x), alpha=d.residual_scale)
        weight: Any = self.norm(norm)
        return lambda x, residual: residual.add_(rms_norm(product(x), weight, d.eps))

    def matrix(self, module: Any) -> _Matrix:
        """Return a linear layer with its active LoRA adapters.

        Merged into 16-bit weights, an adapter's small changes would be rounded away: there they stay factors.
        """
        if plain_class(module) is nn.Linear:
            bias = None if module.bias is None else module.bias.detach().to(self.dtype)
            return _Matrix(module.weight.detach().to(self.dtype), bias)
        base = self.matrix(module.base_layer)
        if module.disable_adapters or module.merged:
            return base
        active = [name for name in module.active_adapters if name in module.lora_A]
        if self.merged:
            weight = base.weight
            for name in active:
                weight = weight + module.get_delta_weight(name).detach().to(weight.dtype)
            return _Matrix(weight, base.bias)
        factors = [
            (
                module.lora_A[name].weight.detach().to(self.dtype),
                (module.lora_B[name].weight.detach() * module.scaling[name]).to(self.dtype),
            )
            for name in active
        ]
        return _Matrix(base.weight, base.bias, base.factors + tuple(factors))


def why_no_decoder(model: Any, longest: int = 0) -> str | None:
    """Return the reason the hand-written decoder cannot run rows of up to ``longest`` tokens, or None. Costs no copies."""
    try:
        most = describe(model).most_tokens
    except NotCovered as reason:
        return str(reason)
    if most is not None and longest > most:
        return f"its attention changes from position {most} on, and rows have up to {longest} tokens"
    return None


class WeightPool:
    """Keeps the tensors that a CUDA graph reads at one address: later readings of a model are copied into those of the first.

    ``moved`` says that the last reading found tensors which cannot stay where they were (weights that the model itself now
    keeps elsewhere, other adapters): graphs captured before it are void.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []  # a sharded weight's storage comes back elsewhere
        self._lent: set[int] = set()
        self._next = 0
        self.moved = False

    def begin(self, model: Any) -> None:
        """Start a reading."""
        self._lent = {_storage(t) for t in (*model.parameters(), *model.buffers())}
        self._next, self.moved = 0, False

    def keep(self, tensor: Tensor) -> Tensor:
        """Return the tensor of this turn with the numbers of ``tensor``."""
        turn, self._next = self._next, self._next + 1
        if turn == len(self._tensors):
            self._tensors.append(tensor)
            self._addresses.append(_address(tensor))
            self.moved = True
            return tensor
        old = self._tensors[turn]
        alike = (old.shape, old.stride(), old.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        same = _storage(old) == _storage(tensor) and old.storage_offset() == tensor.storage_offset()
        if alike and same and self._addresses[turn] == _address(tensor):
            return old
        if alike and not {_storage(old), _storage(tensor)} & self._lent:
            return old.copy_(tensor)
        self._tensors[turn], self._addresses[turn] = tensor, _address(tensor)
        self.moved = True
        return tensor

    def end(self) -> None:
        """End a reading."""
        self.moved |= self._next < len(self._tensors)
        del self._tensors[self._next :], self._addresses[self._next :]

    @property
    def own_bytes(self) -> int:
        """Memory of what is not the model's own."""
        return sum(t.nbytes for t in self._tensors if _storage(t) not in self._lent)


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.device.type in ("cpu", "cuda") else 0


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def read_weights(
    model: Any, rows: int, pool: WeightPool | None = None, *, exact: bool = False
) -> DecoderWeights:
    """Lay the present weights out for decoding about ``rows`` rows.

    On a GPU, weights in the products' type are read where they lie; only queries', keys' and values' are joined (a copy of
    about 6 % of the weights, which saves launches), with the factors of their adapters. With a ``pool`` everything stays at one
    address from one reading to the next. ``exact``: products in the weights' type, and as few copies as on a GPU.

    Raises:
        NotCovered: See ``why_no_decoder``.
    """
    d = describe(model)
    embedding = d.decoder.embed_tokens.weight.detach()
    dtype = weight_dtype(model) if exact else compute_dtype(model)
    adapted = any(hasattr(m, "lora_A") for m in d.decoder.layers.modules())
    merged = (dtype == torch.float32 and not exact) or not adapted
    copied = merged and not exact and (embedding.device.type == "cpu" or dtype != embedding.dtype)
    reading = _Reading(d, dtype, merged, copied, rows)
    if pool is not None:
        pool.begin(model)
        reading = replace(reading, keep=pool.keep)
    attention, mlp = d.layers[0].attention, d.layers[0].mlp
    scale_in_weights = hasattr(attention, "q_norm") or dtype == torch.float32
    rotations, scale = [read_rotation(d, kind) for kind in d.rotations], float(attention.scaling)
    layers = [
        _read_layer(layer, reading, rotations[layer.rotation].turned, scale if scale_in_weights else 1.0)
        for layer in d.layers
    ]
    activation = getattr(mlp, "act_fn", None) or mlp.activation_fn
    weights = DecoderWeights(
        layers=layers,
        embedding_VH=reading.keep(embedding),
        embedding_scale=d.embedding_scale,
        final_norm=reading.norm(d.decoder.norm, d.logit_scale),  # type: ignore[arg-type]
        head=_capped(reading.matrix(d.causal.lm_head).linear(reading), d.logit_cap),
        rotations=rotations,
        gated=_gated(activation, embedding.device),
        eps=d.eps,
        heads=d.heads,
        kv_heads=d.kv_heads,
        head_dim=d.head_dim,
        dtype=dtype,
        query_scale=1.0 if scale_in_weights else scale,
    )
    if pool is not None:
        pool.end()
    return weights


def _read_layer(layer: LayerModules, reading: _Reading, turned: int, scale: float) -> Layer:
    d, attention = reading.description, layer.attention
    gates = [reading.matrix(m) for m in mlp_inputs(layer.mlp)]
    gate, up = gates if len(gates) == 2 else gates[0].split([gates[0].weight.shape[0] // 2] * 2)
    if reading.copied:
        both = _join(gate, up).linear(reading)

        def gate_up(x: Tensor) -> Sequence[Tensor]:
            return both(x).chunk(2, dim=-1)

    else:
        gate_up = _each((gate, up), reading)  # type: ignore[assignment]

    qkv, norm_ND = _read_attention(attention, reading, turned, scale)
    return Layer(
        attention_norm=reading.norm(layer.before_attention),
        qkv=lambda x: qkv(x).view(x.shape[0], -1, d.head_dim),
        qk_norm_ND=norm_ND,
        output_add=reading.added(attention.o_proj, layer.after_attention),
        mlp_norm=reading.norm(layer.before_mlp),
        gate_up=gate_up,
        down_add=reading.added(layer.mlp.down_proj, layer.after_mlp),
        rotation=layer.rotation,
        window=layer.window,
    )


def _read_attention(
    attention: Any, reading: _Reading, turned: int, scale: float
) -> tuple[Linear, Tensor | None]:
    """Return x → queries, keys and values side by side, and the weights (H + K, D) of the norm of each head, if there is one."""
    d = reading.description
    sizes = [n * d.head_dim for n in (d.heads, d.kv_heads, d.kv_heads)]
    parts = [reading.matrix(m) for m in attention_inputs(attention)]
    q, k, v = parts if len(parts) == 3 else parts[0].split(sizes)

    def in_pairs(tensor: Tensor) -> Tensor:
        return _in_pairs(tensor, d.head_dim, turned)

    if not hasattr(attention, "q_norm"):
        q = q if scale == 1.0 else q.outputs(lambda t: t * scale)
        return _join(q.outputs(in_pairs), k.outputs(in_pairs), v).linear(reading), None
    q_norm, k_norm = (
        in_pairs(m.weight.detach().float() + d.family.norm_offset)
        for m in (attention.q_norm, attention.k_norm)
    )
    qkv = _join(q.outputs(in_pairs), k.outputs(in_pairs), v).linear(reading)
    if len(q_norm) == d.head_dim:
        of_heads = [(q_norm * scale).expand(d.heads, -1), k_norm.expand(d.kv_heads, -1)]
        return qkv, reading.keep(torch.cat(of_heads).contiguous())
    whole = reading.keep(q_norm * scale), reading.keep(k_norm)

    def normed_qkv(x: Tensor) -> Tensor:
        queries, keys, values = qkv(x).split(sizes, dim=-1)
        both = [rms_norm(t, w, d.eps).to(t.dtype) for t, w in zip((queries, keys), whole, strict=True)]
        return torch.cat([*both, values], dim=-1)

    return normed_qkv, None


def _gated(activation: Callable[[Tensor], Tensor], device: torch.device) -> Callable[..., Tensor]:
    """Return (gate, up) → activation(gate) · up, in one kernel where Triton runs."""
    if type(activation).__name__ not in ("SiLU", "SiLUActivation"):  # torch's, transformers'
        return lambda gate, up: activation(gate) * up
    if device.type == "cuda" and why_no_triton() is None:
        from algorist.rollouts.native.triton_gated import silu_gated

        return silu_gated
    return lambda gate, up: F.silu(gate) * up


def _capped(product: Linear, cap: float | None) -> Linear:
    return product if cap is None else lambda x: (product(x) / cap).tanh_().mul_(cap)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of ``x``, computed in the weights' type."""
    return F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, eps)


def _join(*parts: _Matrix) -> _Matrix:
    biases = [part.bias for part in parts if part.bias is not None]
    bias = torch.cat(biases) if len(biases) == len(parts) else None
    weight = torch.cat([part.weight for part in parts])
    firsts = [first for part in parts for first, _ in part.factors]
    if not firsts:
        return _Matrix(weight, bias)
    seconds = [
        [second for _, second in part.factors] or [part.weight.new_empty(len(part.weight), 0)]
        for part in parts
    ]
    second = torch.block_diag(*(torch.cat(of_part, 1) for of_part in seconds))
    return _Matrix(weight, bias, ((torch.cat(firsts), second),))


def _in_pairs(tensor: Tensor, head_dim: int, turned: int) -> Tensor:
    """Put the dimensions of each head that are rotated together side by side, so that RoPE is one complex product.

    They are the first ``turned`` and the next as many; the rest stays. Queries and keys are reordered alike, so their dot
    products stay the same.
    """
    heads = tensor.unflatten(0, (-1, head_dim))
    if not turned:
        return tensor
    pairs = heads[:, : 2 * turned].unflatten(1, (2, turned)).transpose(1, 2).flatten(1, 2)
    rest = heads[:, 2 * turned :]
    return (torch.cat([pairs, rest], 1) if rest.shape[1] else pairs).flatten(0, 1)
