"""What the rollout engines use of transformers and torch beyond their documented interfaces."""

from __future__ import annotations

import inspect

import torch
import transformers as hf
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from algorist.rollouts.native.families import describe, read_rotation
from tests.unit.rollouts.rollout_models import FAMILIES, build, model_of


def test_cache_rows_can_be_selected() -> None:
    for family in ("qwen2", "gemma2"):
        cache = DynamicCache(config=model_of(family).config)
        for layer in range(2):
            cache.update(torch.randn(3, 2, 4, 16), torch.randn(3, 2, 4, 16), layer)
        keys = cache.layers[0].keys.clone()
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        assert torch.equal(cache.layers[0].keys, keys[[2, 0, 0]])
        assert {type(layer) for layer in cache.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}


def test_rows_of_other_states_can_be_selected() -> None:
    cache = DynamicCache(config=model_of("lfm2").config)
    cache.update_conv_state(torch.arange(3.0).view(3, 1, 1).expand(3, 48, 4), 0, conv_kernel_size=3)
    cache.reorder_cache(torch.tensor([2, 0]))
    assert isinstance(cache.layers[0], LinearAttentionLayer)
    assert cache.layers[0].conv_states[0][:, 0, 0].tolist() == [2.0, 0.0]


def test_forward_takes_what_we_pass() -> None:
    for family in FAMILIES:
        names = set(inspect.signature(model_of(family).forward).parameters)
        assert {
            "input_ids",
            "attention_mask",
            "position_ids",
            "past_key_values",
            "use_cache",
            "logits_to_keep",
        } <= names


BEFORE = {"input", "pre_feedforward"}
AFTER = {"post_attention", "post_feedforward"}


def test_decoder_attributes() -> None:
    for family, (_, _, _, covered) in FAMILIES.items():
        if not covered:
            continue
        description = describe(model_of(family))
        rotary = description.decoder.rotary_emb
        assert isinstance(rotary.rope_type, (str, dict))
        for kind in description.rotations:
            assert read_rotation(description, kind).frequency.shape == (description.head_dim // 2,)
        for layer in description.decoder.layers:
            assert isinstance(layer.self_attn.scaling, float)
            norms = {f"{name}_layernorm" for name in BEFORE | AFTER}
            names = {name for name, _ in layer.named_children() if "dropout" not in name}
            assert names - norms == {"self_attn", "mlp"} and len(names & norms) in (2, 4)
            assert all(getattr(layer, name).weight.dim() == 1 for name in names & norms)
            inputs = {"qkv_proj"} if family == "phi4_mini" else {"q_proj", "k_proj", "v_proj"}
            rest = set(dict(layer.self_attn.named_children())) - inputs
            assert rest in ({"o_proj"}, {"o_proj", "q_norm", "k_norm"})


def test_sliding_window_of_mistral_lies_in_its_config() -> None:
    assert hf.MistralConfig().sliding_window == 4096
    assert build("mistral_window").config.sliding_window == 8


def test_generation_config_of_our_own_is_all_that_counts() -> None:
    """``generate`` fills what a passed config leaves open from the model's: that one is swapped as well."""
    assert isinstance(model_of("qwen2").generation_config, GenerationConfig)


def test_lora_layers_offer_their_delta() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build("qwen2"), LoraConfig(target_modules=["q_proj"]))
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    assert type(layer.base_layer) is torch.nn.Linear
    assert layer.get_delta_weight("default").shape == layer.base_layer.weight.shape
    assert layer.active_adapters == ["default"] and not layer.disable_adapters and not layer.merged
    assert layer.lora_variant == {} and not any(layer.lora_bias.values())


def test_linear_operators_of_torchs_compiler() -> None:
    linear = torch.ops.mkldnn._linear_pointwise.default._schema
    assert [a.name for a in linear.arguments] == ["X", "W", "B", "attr", "scalars", "algorithm"]
    binary = torch.ops.mkldnn._linear_pointwise.binary._schema
    assert [a.name for a in binary.arguments] == ["X", "other", "W", "B", "attr"]
    if torch.backends.mkl.is_available():
        laid_out = torch.ops.mkl._mkl_linear.default._schema
        names = ["X", "MKL_W", "ORI_W", "B", "batch_size"]
        assert [a.name for a in laid_out.arguments] == names
