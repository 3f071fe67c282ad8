"""Description of a decoder, read from a Hugging Face model: the hand-written forward runs it.

Modules and configuration say most of it: which norms stand before and after attention and MLP, norms of queries and keys,
windows, rotations by kind of layer, factors. A family's entry says the rest. Adding a family is one entry of ``FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorist.models.precision import HALF
from algorist.models.sharding import is_sharding_hook, plain_class

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


class NotCovered(Exception):
    """The hand-written decoder cannot run this model; the text says why."""


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a family that its modules do not tell: what its norms add to their weights, and which attentions rotate queries and keys."""

    norm_offset: float = 0.0
    rotates: Callable[[Any], bool] = lambda attention: True


# Exact classes only: a subclass may compute something else. A class from elsewhere is named in full, ``package.module.Class``.
FAMILIES: dict[str, Family] = {
    "Qwen2ForCausalLM": Family(),
    "Qwen3ForCausalLM": Family(),
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "MinistralForCausalLM": Family(),
    "Ministral3ForCausalLM": Family(),
    "GemmaForCausalLM": Family(norm_offset=1.0),
    "Gemma3ForCausalLM": Family(norm_offset=1.0),
    "SmolLM3ForCausalLM": Family(rotates=lambda attention: bool(attention.use_rope)),
    "Olmo2ForCausalLM": Family(),
    "Olmo3ForCausalLM": Family(),
    "Exaone4ForCausalLM": Family(rotates=lambda a: a.sliding_window is None or a.is_sliding),
    "GraniteForCausalLM": Family(),
    "Phi3ForCausalLM": Family(),
}


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of a head: position t turns pair i by t · frequency[i] and scales it; the pairs after the first ``turned`` stay."""

    frequency: Tensor
    scale: Tensor
    turned: int


@dataclass(frozen=True, slots=True)
class LayerModules:
    """The modules of a layer, whatever they are called; a norm that it lacks is None.

    ``rotation`` is a place in the description's ``rotations``.
    """

    attention: Any
    mlp: Any
    before_attention: Any
    after_attention: Any
    before_mlp: Any
    after_mlp: Any
    window: int | None
    rotation: int


@dataclass(frozen=True, slots=True)
class Description:
    """A decoder: layers, and numbers for all of them.

    ``rotations`` are the kinds of layers that rotate alike: '' where all do, None for those without positions. Beyond
    ``most_tokens`` the model computes something else.
    """

    causal: Any
    family: Family
    layers: list[LayerModules]
    rotations: list[str | None]
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    logit_cap: float | None
    most_tokens: int | None

    @property
    def decoder(self) -> Any:
        """The model below the head."""
        return self.causal.model


def describe(model: Any) -> Description:
    """Describe a model's decoder; costs no copies.

    Raises:
        NotCovered: It has a part that the hand-written decoder lacks.
    """
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind = plain_class(causal)
    name = (
        kind.__name__ if kind.__module__.startswith("transformers.") else f"{kind.__module__}.{kind.__name__}"
    )
    family = FAMILIES.get(name)
    if family is None:
        raise NotCovered(f"{name} is not one of {', '.join(FAMILIES)}")
    config, decoder = causal.config, causal.model
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kinds, rotations, layers = getattr(config, "layer_types", None), [], []
    for index, layer in enumerate(decoder.layers):
        local = not kinds or kinds[index] == "sliding_attention"
        of_kind = kinds[index] if kinds and isinstance(decoder.rotary_emb.rope_type, dict) else ""
        of_kind = of_kind if family.rotates(layer.self_attn) else None
        if of_kind not in rotations:
            rotations.append(of_kind)
        window = getattr(config, "sliding_window", None) if local else None
        layers.append(_modules(layer, window, rotations.index(of_kind)))
    description = Description(
        causal=causal,
        family=family,
        layers=layers,
        rotations=rotations,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        embedding_scale=_embedding_scale(config, decoder.embed_tokens),
        residual_scale=float(getattr(config, "residual_multiplier", 1.0)),
        logit_scale=1.0 / float(getattr(config, "logits_scaling", 1.0)),
        logit_cap=getattr(config, "final_logit_softcapping", None),
        most_tokens=_most_tokens(config, decoder.rotary_emb),
    )
    _check_modules(description)
    return description


def _modules(layer: Any, window: int | None, rotation: int) -> LayerModules:
    """Tell a layer's norms apart: a norm after the MLP says that the one called post_attention comes after attention."""
    sandwiched = hasattr(layer, "post_feedforward_layernorm")
    post = layer.post_attention_layernorm
    return LayerModules(
        attention=layer.self_attn,
        mlp=layer.mlp,
        before_attention=getattr(layer, "input_layernorm", None),
        after_attention=post if sandwiched else None,
        before_mlp=getattr(layer, "pre_feedforward_layernorm", None) if sandwiched else post,
        after_mlp=layer.post_feedforward_layernorm if sandwiched else None,
        window=window,
        rotation=rotation,
    )


def _rope_type(rotary: Any, kind: str) -> str:
    return rotary.rope_type[kind] if kind else rotary.rope_type  # type: ignore[no-any-return]


def read_rotation(description: Description, kind: str | None) -> Rotation:
    """Return the rotation of a kind of layer."""
    rotary, pairs = description.decoder.rotary_emb, description.head_dim // 2
    if kind is None:
        frequency = torch.zeros(pairs, device=description.decoder.embed_tokens.weight.device)
        return Rotation(frequency, torch.ones_like(frequency), 0)
    prefix = f"{kind}_" if kind else ""
    # A longrope's present frequencies are those of the longest row that its forward saw last.
    original = "original_" if _rope_type(rotary, kind) == "longrope" else ""
    frequency = getattr(rotary, f"{prefix}{original}inv_freq").detach().float()
    scale = torch.full_like(frequency, float(getattr(rotary, f"{prefix}attention_scaling")))
    still = (0, pairs - len(frequency))
    return Rotation(F.pad(frequency, still), F.pad(scale, still, value=1.0), len(frequency))


def _embedding_scale(config: Any, embedding: Any) -> float:
    scale = getattr(embedding, "scalar_embed_scale", None)
    if scale is None:
        return float(getattr(config, "embedding_multiplier", 1.0))
    return float(torch.tensor(scale, dtype=embedding.weight.dtype))


def _most_tokens(config: Any, rotary: Any) -> int | None:
    """Return the length from which on frequencies or scores change with the position, or None."""
    parameters = getattr(config, "rope_parameters", None) or {}
    changes = rotary.rope_type == "longrope" or parameters.get("llama_4_scaling_beta")
    return int(parameters["original_max_position_embeddings"]) if changes else None


def projections(module: Any, joined: str, names: tuple[str, ...]) -> list[Any]:
    """Return the linear layers of attention or MLP: the one that joins them, or each."""
    return [getattr(module, joined)] if hasattr(module, joined) else [getattr(module, name) for name in names]


def attention_inputs(attention: Any) -> list[Any]:
    """Return the linear layers of queries, keys and values."""
    return projections(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"))


def mlp_inputs(mlp: Any) -> list[Any]:
    """Return the linear layers of gate and up."""
    return projections(mlp, "gate_up_proj", ("gate_proj", "up_proj"))


def _check_modules(description: Description) -> None:
    """Refuse modules that are not what their names say: another linear layer, an adapter's variant, a hook, several types."""
    decoder, embedding = description.decoder, description.decoder.embed_tokens
    for kind in description.rotations:
        if kind is not None and (rope_type := _rope_type(decoder.rotary_emb, kind)) not in ROPE_TYPES:
            raise NotCovered(f"its RoPE scaling is of type '{rope_type}'")
    linears = [description.causal.lm_head]
    for layer in description.layers:
        if not getattr(layer.attention, "is_causal", True):
            raise NotCovered("its attention is not causal")
        linears += [*attention_inputs(layer.attention), layer.attention.o_proj]
        linears += [*mlp_inputs(layer.mlp), layer.mlp.down_proj]
    scaled = hasattr(embedding, "scalar_embed_scale") and plain_class(embedding).__module__.startswith(
        "transformers."
    )
    if not (plain_class(embedding) is nn.Embedding or scaled):
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
