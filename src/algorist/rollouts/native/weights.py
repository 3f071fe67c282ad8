"""Reads the weights of a Hugging Face decoder for the hand-written forward, and says what it does not cover."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorist.models.precision import HALF, compute_dtype
from algorist.models.products import Linear, LinearAdd, fixed_linear, why_no_triton
from algorist.models.sharding import is_sharding_hook, plain_class

# Families whose decoder is: RMS norm, rotary attention with grouped heads, gated MLP. Exact classes only: a subclass may
# compute something else.
FAMILIES = (
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "GemmaForCausalLM",
)
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class NotCovered(Exception):
    """The hand-written decoder cannot run this model; the text says why."""


@dataclass(slots=True)
class Layer:
    """One decoder layer, ready to run. ``qkv`` gives queries, keys and values (S, N, D), ``gate_up`` gate and up."""

    attention_norm: Tensor
    qkv: Linear
    qk_norm_ND: Tensor | None
    output_add: LinearAdd
    mlp_norm: Tensor
    gate_up: Callable[[Tensor], Sequence[Tensor]]
    down_add: LinearAdd


@dataclass(slots=True)
class DecoderWeights:
    """A whole decoder. ``inverse_frequency`` and ``rope_scale`` give the rotation of position t: t · frequency.

    ``dtype`` is the type of the products; the stream between the layers has the embedding's, as under autocast.
    ``interleaved``: the head dimensions of queries and keys come as pairs to rotate, not as two halves.
    ``query_scale`` is the factor of the scores that the weights do not hold yet.
    """

    layers: list[Layer]
    embedding_VH: Tensor
    embedding_scale: float
    final_norm: Tensor
    head: Linear
    inverse_frequency: Tensor
    rope_scale: float
    gated: Callable[[Tensor, Tensor], Tensor]
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    interleaved: bool
    query_scale: float


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A linear layer: weight and bias in the products' type, and the factors (A, B) of adapters that are not merged."""

    weight: Tensor
    bias: Tensor | None
    factors: tuple[tuple[Tensor, Tensor], ...] = ()

    def times(self, factor: float) -> _Matrix:
        """Return the layer with its outputs scaled."""
        if factor == 1.0:
            return self
        return _Matrix(self.weight * factor, None if self.bias is None else self.bias * factor)

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

    dtype: torch.dtype
    merged: bool
    copied: bool
    rows: int
    keep: Callable[[Tensor], Tensor] = lambda tensor: tensor

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


def why_no_decoder(model: Any) -> str | None:
    """Return the reason the hand-written decoder cannot run this model, or None. Costs no copies."""
    try:
        _check(model)
    except NotCovered as reason:
        return str(reason)
    return None


def window_of(model: Any) -> int | None:
    """Return the sliding window of a model whose layers all use one (Mistral), or None."""
    return getattr(model.config, "sliding_window", None) if model.config.model_type == "mistral" else None


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


def read_weights(model: Any, rows: int, pool: WeightPool | None = None) -> DecoderWeights:
    """Lay the present weights out for decoding about ``rows`` rows.

    On a GPU, weights in the products' type are read where they lie; only queries', keys' and values' are joined (a copy of
    about 6 % of the weights, which saves launches), with the factors of their adapters. With a ``pool`` everything stays at one
    address from one reading to the next.

    Raises:
        NotCovered: See ``why_no_decoder``.
    """
    causal, decoder, rotary = _check(model)
    config = causal.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    gemma = config.model_type == "gemma"
    embedding, dtype = decoder.embed_tokens.weight.detach(), compute_dtype(model)
    merged = dtype == torch.float32 or not any(hasattr(m, "lora_A") for m in decoder.layers.modules())
    copied = merged and (embedding.device.type == "cpu" or dtype != embedding.dtype)
    reading = _Reading(dtype, merged, copied, rows)
    if pool is not None:
        pool.begin(model)
        reading = replace(reading, keep=pool.keep)
    scale_in_weights = hasattr(decoder.layers[0].self_attn, "q_norm") or dtype == torch.float32
    scale = head_dim**-0.5 if scale_in_weights else 1.0
    layers = [
        _read_layer(layer, reading, (heads, kv_heads, head_dim), scale, gemma) for layer in decoder.layers
    ]
    weights = DecoderWeights(
        layers=layers,
        embedding_VH=reading.keep(embedding),
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
        final_norm=reading.keep(_norm_weight(decoder.norm, gemma)),
        head=reading.matrix(causal.lm_head).linear(reading),
        inverse_frequency=rotary.inv_freq.detach().float(),
        rope_scale=float(rotary.attention_scaling),
        gated=_gated(config.hidden_act, decoder.layers[0].mlp.act_fn, embedding.device),
        eps=config.rms_norm_eps,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        interleaved=merged,
        query_scale=1.0 if scale_in_weights else head_dim**-0.5,
    )
    if pool is not None:
        pool.end()
    return weights


def _read_layer(
    layer: Any, reading: _Reading, sizes: tuple[int, int, int], scale: float, gemma: bool
) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    heads, kv_heads, head_dim = sizes
    norm = None
    if hasattr(attention, "q_norm"):
        weights = [m.weight.detach().float() for m in (attention.q_norm, attention.k_norm)]
        q_norm, k_norm = (_interleave(w, 1) if reading.merged else w for w in weights)
        norm = torch.cat([(q_norm * scale).expand(heads, -1), k_norm.expand(kv_heads, -1)]).contiguous()
        norm = reading.keep(norm)
        scale = 1.0
    q, k, v = (reading.matrix(m) for m in (attention.q_proj, attention.k_proj, attention.v_proj))
    gate, up = (reading.matrix(m) for m in (mlp.gate_proj, mlp.up_proj))
    if reading.merged:
        turned = [
            _Matrix(_interleave(m.weight, n), None if m.bias is None else _interleave(m.bias, n))
            for m, n in ((q.times(scale), heads), (k, kv_heads))
        ]
        qkv = _join(*turned, v).linear(reading)
    else:
        qkv = _join(q, k, v).linear(reading)
    if reading.copied:
        both = _join(gate, up).linear(reading)

        def gate_up(x: Tensor) -> Sequence[Tensor]:
            return both(x).chunk(2, dim=-1)

    else:
        gate_up = _each((gate, up), reading)  # type: ignore[assignment]

    stream = layer.input_layernorm.weight.dtype
    return Layer(
        attention_norm=reading.keep(_norm_weight(layer.input_layernorm, gemma)),
        qkv=lambda x: qkv(x).view(x.shape[0], -1, head_dim),
        qk_norm_ND=norm,
        output_add=reading.matrix(attention.o_proj).linear_add(reading, stream),
        mlp_norm=reading.keep(_norm_weight(layer.post_attention_layernorm, gemma)),
        gate_up=gate_up,
        down_add=reading.matrix(mlp.down_proj).linear_add(reading, stream),
    )


def _gated(name: str, activation: Callable[[Tensor], Tensor], device: torch.device) -> Callable[..., Tensor]:
    """Return (gate, up) → activation(gate) · up, in one kernel where Triton runs."""
    if name != "silu":
        return lambda gate, up: activation(gate) * up
    if device.type == "cuda" and why_no_triton() is None:
        from algorist.rollouts.native.triton_gated import silu_gated

        return silu_gated
    return lambda gate, up: F.silu(gate) * up


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


def _interleave(weight: Tensor, heads: int) -> Tensor:
    """Reorder each head's outputs from (first half, second half) to pairs, so that RoPE is one complex product.

    Queries and keys are reordered alike, so their dot products stay the same.
    """
    parts = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return parts.transpose(1, 2).reshape(weight.shape).contiguous()


def _norm_weight(norm: Any, gemma: bool) -> Tensor:
    weight = norm.weight.detach()
    return weight + 1.0 if gemma else weight


def _check(model: Any) -> tuple[Any, Any, Any]:
    """Return (causal LM, decoder, rotary embedding), or raise NotCovered."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind = plain_class(causal)
    name = kind.__name__
    if name not in FAMILIES or not kind.__module__.startswith("transformers."):
        raise NotCovered(f"{name} is not one of {', '.join(FAMILIES)}")
    config, decoder = causal.config, causal.model
    rotary = decoder.rotary_emb
    if rotary.rope_type not in ROPE_TYPES:
        raise NotCovered(f"its RoPE scaling is of type '{rotary.rope_type}'")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if 2 * rotary.inv_freq.numel() != head_dim:
        raise NotCovered("it rotates only a part of each head")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) and name != "MistralForCausalLM":
        raise NotCovered("some of its layers attend to a sliding window")
    if name == "GemmaForCausalLM" and decoder.embed_tokens.weight.dtype != torch.float32:
        raise NotCovered("Gemma's norms add 1 to their weights in float32")
    _check_modules(causal, decoder)
    return causal, decoder, rotary


def _check_modules(causal: Any, decoder: Any) -> None:
    linears = [causal.lm_head]
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        linears += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    embedding = decoder.embed_tokens
    if plain_class(embedding).__name__ not in ("Embedding", "GemmaTextScaledWordEmbedding") or not hasattr(
        embedding, "weight"
    ):
        raise NotCovered(f"its embedding is a {type(embedding).__name__}")
    for linear in linears:
        base = getattr(linear, "base_layer", linear)
        if plain_class(base) is not nn.Linear or (base is not linear and not hasattr(linear, "lora_A")):
            raise NotCovered(f"a linear layer is a {type(linear).__module__}.{type(linear).__name__}")
        if base is not linear and (linear.lora_variant or any(linear.lora_bias.values())):
            raise NotCovered("its adapter is a LoRA variant (DoRA, a LoRA bias, …)")
        if base.weight.dim() != 2:
            raise NotCovered("its weights are sharded over devices")
    dtypes = {linear.weight.dtype for linear in linears} | {embedding.weight.dtype}
    devices = {linear.weight.device for linear in linears} | {embedding.weight.device}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, *HALF}:
        raise NotCovered(f"its weights are of type {', '.join(sorted(map(str, dtypes)))}")
    if len(devices) > 1 or "meta" in {d.type for d in devices}:
        raise NotCovered("its weights lie on several devices")
    hooked = [
        module
        for module in decoder.layers.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not is_sharding_hook(hook)
    ]
    if hooked:
        raise NotCovered(f"a forward hook is registered on a {type(hooked[0]).__name__}")
