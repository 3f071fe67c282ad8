"""Small random models of many families with varied greedy output, for the tests of the rollout engines."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import transformers as hf

from algorist.extensions.tools.section import ToolsSection
from algorist.extensions.tools.source import Tools
from algorist.models.tiny import train_tokenizer
from algorist.prompts import get_format
from algorist.prompts.chat import render_prompt
from algorist.training.sft import Demonstration, tokenize_demonstrations

PAD, VOCAB = 0, 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,  # nothing ends early unless a test says so
    "pad_token_id": PAD,
    "bos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
BY_POSITION = {"original_max_position_embeddings": 224, "llama_4_scaling_beta": 0.1}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.2, 2.0],
    "long_factor": [2.0, 3.0, 4.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}

# name: (model class, config class, changes to SHAPE, does the hand-written decoder cover it?)
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any], bool]] = {
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {}, True),
    "qwen2_tied": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {"tie_word_embeddings": True}, True),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {"head_dim": 16}, True),
    "llama": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {"num_key_value_heads": 4, "mlp_bias": True, "attention_bias": True},
        True,
    ),
    "llama_llama3_rope": (hf.LlamaForCausalLM, hf.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}, True),
    "qwen3_yarn": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {"head_dim": 16, "rope_parameters": YARN}, True),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": None}, True),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig, {"head_dim": 16}, True),
    "mistral_window": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": 8}, True),
    "ministral": (
        hf.MinistralForCausalLM,
        hf.MinistralConfig,
        {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        True,
    ),
    "ministral3": (
        hf.Ministral3ForCausalLM,
        hf.Ministral3Config,
        {"head_dim": 16, "rope_parameters": {**YARN, **BY_POSITION}},
        True,
    ),
    "gemma3": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig,
        {
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        True,
    ),
    "smollm3": (hf.SmolLM3ForCausalLM, hf.SmolLM3Config, {"no_rope_layers": [1, 0]}, True),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config, {}, True),
    "olmo3": (
        hf.Olmo3ForCausalLM,
        hf.Olmo3Config,
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
        },
        True,
    ),
    "exaone4": (
        hf.Exaone4ForCausalLM,
        hf.Exaone4Config,
        {"sliding_window": 8, "sliding_window_pattern": 2},
        True,
    ),
    "granite": (
        hf.GraniteForCausalLM,
        hf.GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 1.5,
        },
        True,
    ),
    "phi4_mini": (
        hf.Phi3ForCausalLM,
        hf.Phi3Config,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 224},
        True,
    ),
    "llama_dynamic_rope": (hf.LlamaForCausalLM, hf.LlamaConfig, {"rope_parameters": DYNAMIC}, False),
    "gemma2": (
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config,
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
        False,
    ),
    "lfm2": (
        hf.Lfm2ForCausalLM,
        hf.Lfm2Config,
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        False,
    ),
    "qwen3_5": (
        hf.Qwen3_5ForCausalLM,
        hf.Qwen3_5TextConfig,
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        False,
    ),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, {"n_inner": 96}, False),
    "mixtral": (
        hf.MixtralForCausalLM,
        hf.MixtralConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        False,
    ),
    "gpt_oss": (
        hf.GptOssForCausalLM,
        hf.GptOssConfig,
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        False,
    ),
}
NEWER = ["gemma3", "smollm3", "olmo3", "exaone4", "granite", "phi4_mini", "ministral", "ministral3"]
COVERED = [name for name, entry in FAMILIES.items() if entry[3]]


def calling(**shape: Any) -> tuple[Any, Any, Any]:
    """Return a model that has learned one call of the calculator by heart, its tokenizer, and the prompt format that answers it."""
    form = Tools(ToolsSection(use=["calculator"], instructions=False)).instructed(
        get_format("reasoning_answer")
    )
    form = replace(form, system_prompt="")
    text = "<calculator>12 + 30</calculator><output>42</output> so <answer>42</answer>"
    tokenizer = train_tokenizer([text] * 3, vocab_size=400, tags=form.markers)
    demo = Demonstration(render_prompt(form, tokenizer, "q"), text, tuple(form.turns.replies(text)))
    rows, _ = tokenize_demonstrations([demo], tokenizer, max_length=None)
    ids, labels = (torch.tensor([rows[0][name]]) for name in ("input_ids", "labels"))
    torch.manual_seed(7)
    model = hf.Qwen3ForCausalLM(
        hf.Qwen3Config(**{**SHAPE, "head_dim": 16, "vocab_size": len(tokenizer), **shape})
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model(ids, labels=labels).loss.backward()
        optimizer.step()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer, form


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a fresh model whose weights are scaled up so that attention and position matter."""
    model_class, config_class, shape, _ = FAMILIES[family]
    torch.manual_seed(7)
    model = model_class(config_class(**{**SHAPE, **shape, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_(std=0.1)
            elif parameter.dim() == 1 and "gemma" not in family:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.dim() > 1 and "embed" not in name and "wte" not in name and "wpe" not in name:
                parameter.mul_(9.0)
        # With tied embeddings the logits get their spread from the last norm, so that the residual stream, and with it
        # the greedy output, is made by the layers and not by the token just read.
        if model.config.tie_word_embeddings:
            base = model.base_model
            last_norm = next(getattr(base, n) for n in ("norm", "embedding_norm", "ln_f") if hasattr(base, n))
            last_norm.weight.mul_(12.0).add_(12.0 if "gemma" in family else 0.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model.to(dtype)


@cache
def model_of(family: str) -> Any:
    """Return the shared model of a family; tests must leave it as it was."""
    return build(family)


def prompts_of(lengths: tuple[int, ...] = (5, 12, 9, 1), seed: int = 0) -> list[list[int]]:
    """Return random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def greedy_of_generate(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Return what ``model.generate`` adds to one prompt, greedily."""
    was_training = model.training
    out = model.eval().generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)
    model.train(was_training)
    return out[0, len(prompt) :].tolist()


def greedy_of(family: str, prompt: list[int], new_tokens: int = 24) -> list[int]:
    """Return what ``model_of(family).generate`` adds, computed once for all engines."""
    return list(_greedy_of(family, tuple(prompt), new_tokens))


@cache
def _greedy_of(family: str, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    return greedy_of_generate(model_of(family), list(prompt), new_tokens)


def fresh_log_probs(
    model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probs of a completion from one plain forward pass."""
    was_training = model.training
    with torch.no_grad():
        logits = model.eval()(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    model.train(was_training)
    log_probs = (logits / temperature).log_softmax(-1)
    return log_probs.gather(-1, torch.tensor(completion).unsqueeze(-1)).squeeze(-1)
