"""A rollout on a GPU: the CPU's tokens and log-probs, few launches, few waits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf

from algorist.rollouts.base import Completion, SamplingParams
from algorist.rollouts.native import NativeEngine
from tests.cuda.pretend import pretend_gpu, to_device

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


def model(layers: int = 2, **changes: Any) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"vocab_size": 4096, "max_position_embeddings": 512, "eos_token_id": 1}
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(num_hidden_layers=layers, **(shape | changes)))


def compare(ours: list[list[Completion]], theirs: list[list[Completion]], within: float) -> None:
    assert [[c.token_ids for c in g] for g in ours] == [[c.token_ids for c in g] for g in theirs]
    flat = [[p for g in groups for c in g for p in c.log_probs] for groups in (ours, theirs)]
    torch.testing.assert_close(*(torch.tensor(f) for f in flat), atol=within, rtol=0)


@pytest.mark.parametrize("budget", [None, 200], ids=["one wave", "refilled"])
def test_same_tokens_and_log_probs_as_on_the_cpu(budget: int | None) -> None:
    params = SamplingParams(max_new_tokens=40, seed=3)
    policy = model()
    expected = NativeEngine(policy, tier="decoder").generate(PROMPTS, 4, params)
    with pretend_gpu():
        engine = NativeEngine(to_device(copy.deepcopy(policy)), tier="decoder", token_budget=budget)
        compare(engine.generate(PROMPTS, 4, params), expected, 1e-5)


def per_token(layers: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return launches and waits per decoded token."""
    found = []
    for count in (10, 30):
        with pretend_gpu() as log:
            policy = to_device(model(layers, eos_token_id=None).to(dtype))
            log.reset()
            params = SamplingParams(max_new_tokens=count, seed=3)
            NativeEngine(policy, tier="decoder", eos_token_ids=[]).generate(PROMPTS, 4, params)
            found.append((sum(log.launches.values()), sum(log.syncs.values())))
    return (found[1][0] - found[0][0]) / 20, (found[1][1] - found[0][1]) / 20


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 34), (torch.bfloat16, 45)])
def test_launches_and_waits_per_token(dtype: torch.dtype, most: int) -> None:
    (one, waits), (two, _) = per_token(1, dtype), per_token(2, dtype)
    assert two - one <= most, f"{two - one} launches per layer and token"
    assert one - (two - one) <= 50
    assert waits == 1
