"""Dropout of a model's own configuration is off in the update with rewards: its first log-probs are those of sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
)

from algorist.rollouts import make_engine
from tests.tiny import STOPS, TOKENIZER, make_model, make_trainer, section

IDS: dict[str, Any] = {
    "pad_token_id": TOKENIZER.pad_token_id,
    "eos_token_id": TOKENIZER.eos_token_id,
    "bos_token_id": None,
    "vocab_size": len(TOKENIZER),
}


def qwen() -> PreTrainedModel:
    config = make_model().config
    config.attention_dropout = 0.1
    return Qwen2ForCausalLM(config)


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **IDS))


def big_code() -> PreTrainedModel:
    return GPTBigCodeForCausalLM(GPTBigCodeConfig(n_embd=32, n_layer=2, n_head=4, n_positions=128, **IDS))


def opt() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return OPTForCausalLM(OPTConfig(word_embed_proj_dim=32, max_position_embeddings=128, **sizes, **IDS))


@pytest.mark.slow
@pytest.mark.parametrize("make", [qwen, gpt2, big_code, opt])
@pytest.mark.parametrize("lora", [False, True])
def test_the_first_update_is_of_the_model_that_sampled(make: Any, lora: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    model.generation_config.eos_token_id = STOPS
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    engine = make_engine("transformers", model, TOKENIZER, section=section())
    trainer = make_trainer(tmp_path, model, engine=engine, max_steps=1)
    trainer.train()
    gap = "sampling/sampling_logp_difference/mean"
    (line,) = [entry for entry in trainer.state.log_history if gap in entry]
    assert line[gap] < 1e-5
