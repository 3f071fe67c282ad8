"""Reads the weights of a Hugging Face decoder for the hand-written forward, and says what it does not cover."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorist.rollouts.linear import Linear, LinearAdd, fixed_linear

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
    """One decoder layer, ready to run. Head dimensions of queries and keys are interleaved (see ``_interleave``)."""

    attention_norm: Tensor
    qkv: Linear
    qk_norm_ND: Tensor | None
    output_add: LinearAdd
    mlp_norm: Tensor
    gate_up: Linear
    down_add: LinearAdd


@dataclass(slots=True)
class DecoderWeights:
    """A whole decoder. ``inverse_frequency`` and ``rope_scale`` give the rotation of position t: t · frequency."""

    layers: list[Layer]
    embedding_VH: Tensor
    embedding_scale: float
    final_norm: Tensor
    head: Linear
    inverse_frequency: Tensor
    rope_scale: float
    activation: Callable[[Tensor], Tensor]
    eps: float
    heads: int
    kv_heads: int
    head_dim: int


def why_no_decoder(model: Any) -> str | None:
    """Return what the hand-written decoder does not cover in this model, or None. Costs no copies."""
    try:
        _check(model)
    except NotCovered as reason:
        return str(reason)
    return None


def window_of(model: Any) -> int | None:
    """Return the sliding window of a model whose layers all use one (Mistral), or None."""
    return getattr(model.config, "sliding_window", None) if model.config.model_type == "mistral" else None


def read_weights(model: Any, rows: int) -> DecoderWeights:
    """Lay the present weights out for decoding about ``rows`` rows, adapters merged into the copies.

    Raises:
        NotCovered: See ``why_no_decoder``.
    """
    causal, decoder, rotary = _check(model)
    config = causal.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    gemma = config.model_type == "gemma"
    layers = [_read_layer(layer, heads, kv_heads, head_dim, gemma, rows) for layer in decoder.layers]
    head_weight, head_bias = _linear_of(causal.lm_head)
    return DecoderWeights(
        layers=layers,
        embedding_VH=decoder.embed_tokens.weight.detach(),
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
        final_norm=_norm_weight(decoder.norm, gemma),
        head=fixed_linear(head_weight, head_bias, rows)[0],
        inverse_frequency=rotary.inv_freq.detach().float(),
        rope_scale=float(rotary.attention_scaling),
        activation=F.silu if config.hidden_act == "silu" else decoder.layers[0].mlp.act_fn,
        eps=config.rms_norm_eps,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )


def _read_layer(layer: Any, heads: int, kv_heads: int, head_dim: int, gemma: bool, rows: int) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    scale = head_dim**-0.5
    q, q_bias = _linear_of(attention.q_proj)
    k, k_bias = _linear_of(attention.k_proj)
    v, v_bias = _linear_of(attention.v_proj)
    qk_norm = None
    if hasattr(attention, "q_norm"):
        q_norm = _interleave(attention.q_norm.weight.detach().float() * scale, 1)
        k_norm = _interleave(attention.k_norm.weight.detach().float(), 1)
        qk_norm = torch.cat([q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)]).contiguous()
        scale = 1.0
    qkv = torch.cat([_interleave(q * scale, heads), _interleave(k, kv_heads), v])
    qkv_bias = None
    if q_bias is not None and k_bias is not None and v_bias is not None:
        qkv_bias = torch.cat([_interleave(q_bias * scale, heads), _interleave(k_bias, kv_heads), v_bias])
    gate, gate_bias = _linear_of(mlp.gate_proj)
    up, up_bias = _linear_of(mlp.up_proj)
    gate_up_bias = torch.cat([gate_bias, up_bias]) if gate_bias is not None and up_bias is not None else None
    return Layer(
        attention_norm=_norm_weight(layer.input_layernorm, gemma),
        qkv=fixed_linear(qkv, qkv_bias, rows)[0],
        qk_norm_ND=qk_norm,
        output_add=fixed_linear(*_linear_of(attention.o_proj), rows)[1],
        mlp_norm=_norm_weight(layer.post_attention_layernorm, gemma),
        gate_up=fixed_linear(torch.cat([gate, up]), gate_up_bias, rows)[0],
        down_add=fixed_linear(*_linear_of(mlp.down_proj), rows)[1],
    )


def _interleave(weight: Tensor, heads: int) -> Tensor:
    """Reorder each head's outputs from (first half, second half) to pairs, so that RoPE is one complex product.

    Queries and keys are reordered alike, so their dot products stay the same.
    """
    parts = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return parts.transpose(1, 2).reshape(weight.shape).contiguous()


def _norm_weight(norm: Any, gemma: bool) -> Tensor:
    weight = norm.weight.detach()
    return weight + 1.0 if gemma else weight


def _linear_of(module: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a linear layer with its active LoRA adapters merged in."""
    if type(module) is nn.Linear:
        return module.weight.detach(), None if module.bias is None else module.bias.detach()
    weight, bias = _linear_of(module.base_layer)
    if module.disable_adapters or module.merged:
        return weight, bias
    for name in module.active_adapters:
        if name in module.lora_A:
            weight = weight + module.get_delta_weight(name).detach().to(weight.dtype)
    return weight, bias


def _check(model: Any) -> tuple[Any, Any, Any]:
    """Return (causal LM, decoder, rotary embedding), or raise NotCovered."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(causal).__name__
    if name not in FAMILIES or not type(causal).__module__.startswith("transformers."):
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
    if type(embedding).__name__ not in ("Embedding", "GemmaTextScaledWordEmbedding") or not hasattr(
        embedding, "weight"
    ):
        raise NotCovered(f"its embedding is a {type(embedding).__name__}")
    for linear in linears:
        base = getattr(linear, "base_layer", linear)
        if type(base) is not nn.Linear or (base is not linear and not hasattr(linear, "lora_A")):
            raise NotCovered(f"a linear layer is a {type(linear).__module__}.{type(linear).__name__}")
        if base is not linear and (linear.lora_variant or any(linear.lora_bias.values())):
            raise NotCovered("its adapter is a LoRA variant (DoRA, a LoRA bias, …)")
        if base.weight.dim() != 2:
            raise NotCovered("its weights are sharded over devices")
    dtypes = {linear.weight.dtype for linear in linears} | {embedding.weight.dtype}
    devices = {linear.weight.device for linear in linears} | {embedding.weight.device}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        raise NotCovered(f"its weights are of type {', '.join(sorted(map(str, dtypes)))}")
    if len(devices) > 1 or "meta" in {d.type for d in devices}:
        raise NotCovered("its weights lie on several devices")
    hooked = [m for m in decoder.layers.modules() if m._forward_hooks or m._forward_pre_hooks]
    if hooked:
        raise NotCovered(f"a forward hook is registered on a {type(hooked[0]).__name__}")
