"""The parts of the fast update: head, packed attention, coverage and fallbacks, regrouping of micro-batches."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from algorist.training.batches import regroup, trim
from algorist.training.head import completion_log_probs
from algorist.training.packed import _SharedPrefixAttention, pack, reference_attention
from algorist.training.update import FastUpdate

VOCAB = 60
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def plain_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    logs = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / temperature, -1)
    return logs.gather(1, targets[:, None]).squeeze(1), -(logs.exp() * logs).sum(1)


@pytest.mark.parametrize("cache_bytes", [0, 1 << 30], ids=["recomputed", "kept"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_head(cache_bytes: int, with_bias: bool, with_entropy: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(23, 8, dtype=torch.float64).float().requires_grad_()
    weight = torch.randn(VOCAB, 8).requires_grad_()
    bias = torch.randn(VOCAB).requires_grad_() if with_bias else None
    targets = torch.randint(0, VOCAB, (23,))
    leaves = [t for t in (hidden, weight, bias) if t is not None]
    weights = torch.randn(2, 23)

    def gradients(log_probs: torch.Tensor, entropy: torch.Tensor | None) -> list[torch.Tensor]:
        total = (log_probs * weights[0]).sum()
        if with_entropy and entropy is not None:
            total = total + (entropy * weights[1]).sum()
        return list(torch.autograd.grad(total, leaves))

    expected = plain_head(hidden, weight, bias, targets, 0.7)
    found = completion_log_probs(
        hidden,
        weight,
        bias,
        targets,
        temperature=0.7,
        compute_entropy=True,
        chunk_elements=5 * VOCAB,
        cache_bytes=cache_bytes,
    )
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(gradients(*found[:2]), gradients(*expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_packed_attention_equals_the_reference() -> None:
    torch.manual_seed(0)
    prompts = [[1, 2, 3]] * 3 + [[4]] * 2 + [[5, 6]]
    completions = [[7], [7, 8, 9, 1], [2, 3], [1, 2, 3, 4, 5], [9, 9], [3]]
    layout = pack(prompts, completions, list(range(6)), 5, torch.device("cpu"), block_tokens=7)
    size = len(layout.tokens_N)
    query = torch.randn(1, 4, size, 8, requires_grad=True)
    key, value = (torch.randn(1, 2, size, 8, requires_grad=True) for _ in range(2))
    weights = torch.randn(1, 4, size, 8)
    results = []
    for function in (reference_attention, _SharedPrefixAttention.apply):
        out = function(query, key, value, layout, 0.3)
        results.append((out, *torch.autograd.grad((out * weights).sum(), (query, key, value))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def build(config: PreTrainedConfig, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **kwargs)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def rows() -> tuple[torch.Tensor, torch.Tensor, int]:
    torch.manual_seed(1)
    ids = torch.randint(1, VOCAB, (4, 14))
    mask = torch.ones_like(ids)
    ids[1, :6], ids[3, :6] = ids[0, :6], ids[2, :6]
    mask[2:, :3] = 0
    for row, length in enumerate((8, 2, 5, 1)):
        mask[row, 6 + length :] = 0
    return ids, mask, 8


def own_log_probs(model: Any, ids: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
    result = torch.zeros(len(ids), width)
    for row in range(len(ids)):
        tokens = ids[row][mask[row].bool()][None]
        count = int(mask[row, -width:].sum())
        logs = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits[0, :-1].float(), -1)
        result[row, :count] = logs.gather(1, tokens[0, 1:, None]).squeeze(1)[-count:]
    return result


COVERED = {
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "llama": LlamaConfig(**SHAPE),
    "llama scaled rope": LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "mistral wide window": MistralConfig(**SHAPE, sliding_window=64),
}


@pytest.mark.parametrize("name", COVERED)
def test_covered_models_equal_their_own_forward(name: str) -> None:
    model = build(COVERED[name])
    ids, mask, width = rows()
    update = FastUpdate()
    found = update.log_probs(model, ids, mask, width)
    assert found is not None, update._said
    expected = own_log_probs(model, ids, mask, width)
    assert expected.std() > 0.5
    torch.testing.assert_close(found[0], expected, atol=2e-4, rtol=1e-4)
    model.train()
    names = [n for n, _ in model.named_parameters()]
    gradients = []
    for result in (update.log_probs(model, ids, mask, width), (own_log_probs(model, ids, mask, width), None)):
        assert result is not None
        gradients.append(torch.autograd.grad((result[0] ** 2).sum(), list(model.parameters())))
    for parameter, ours, theirs in zip(names, *gradients, strict=True):
        assert float((ours - theirs).norm()) <= 2e-5 * float(theirs.norm()) + 1e-5, parameter


NOT_COVERED = {
    "narrow window": (MistralConfig(**SHAPE, sliding_window=6), "sliding window"),
    "soft-capping": (Gemma2Config(**SHAPE, head_dim=8), "softcap"),
    "absolute positions in a packed row": (
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.5),
        "",
    ),
    "state space": (
        MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
        "attention",
    ),
}


@pytest.mark.parametrize("name", NOT_COVERED)
def test_uncovered_models_fall_back_with_one_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config, word = NOT_COVERED[name]
    model = build(config)
    model.train()
    ids, mask, width = rows()
    update = FastUpdate()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert update.log_probs(model, ids, mask, width) is None
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("algorist")]
    assert len(lines) == 1 and word in lines[0] and "TRL's own" in lines[0]
    assert model.config._attn_implementation != "algorist_shared_prefix"


def test_gradient_checkpointing_falls_back_for_training_only() -> None:
    model = build(COVERED["qwen2"])
    model.gradient_checkpointing_enable()
    model.train()
    ids, mask, width = rows()
    update = FastUpdate()
    assert update.log_probs(model, ids, mask, width) is None
    with torch.no_grad():
        assert update.log_probs(model, ids, mask, width) is not None


def test_a_model_that_looks_across_rows_is_found_out() -> None:
    """The check at first use refuses a forward that depends on the packing, whatever its configuration says."""
    model = build(COVERED["llama"])

    def shift(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + output.mean(1, keepdim=True)

    model.model.layers[0].mlp.register_forward_hook(shift)
    ids, mask, width = rows()
    update = FastUpdate()
    assert update.log_probs(model, ids, mask, width) is None
    assert any("differs" in line for line in update._said)


def test_mixture_of_experts_is_covered() -> None:
    shape = {**SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model = build(Qwen3MoeConfig(**shape))
    ids, mask, width = rows()
    found = FastUpdate().log_probs(model, ids, mask, width)
    assert found is not None
    torch.testing.assert_close(found[0], own_log_probs(model, ids, mask, width), atol=5e-4, rtol=1e-3)


def micro_batches() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    result = []
    for index in range(4):
        prompt = torch.tensor([[1, 2], [1, 3], [1, 2], [1, 3]])
        mask = (torch.arange(6)[None] < torch.randint(1, 5, (4, 1))).long()
        result.append(
            {
                "prompt_ids": torch.cat([torch.zeros(4, 2, dtype=torch.long), prompt], 1),
                "prompt_mask": torch.tensor([[0, 0, 1, 1]]).expand(4, -1),
                "completion_ids": torch.randint(1, 9, (4, 6)),
                "completion_mask": mask,
                "advantages": torch.arange(4.0) + 10 * index,
                "num_items_in_batch": torch.tensor(7),
            }
        )
    return result


def test_regroup_keeps_the_rows_of_each_window() -> None:
    batches = micro_batches()
    found = regroup(batches, 2)
    assert len(found) == 4
    for start in (0, 2):
        before = torch.cat([b["advantages"] for b in batches[start : start + 2]])
        after = torch.cat([b["advantages"] for b in found[start : start + 2]])
        assert sorted(after.tolist()) == sorted(before.tolist())
        for batch in found[start : start + 2]:
            assert len({tuple(row) for row in batch["prompt_ids"].tolist()}) == 1
            lengths = batch["completion_mask"].sum(1)
            assert bool((lengths[1:] >= lengths[:-1]).all())
            assert batch["num_items_in_batch"] == 7
    # Every row keeps its own tokens.
    for batch in found:
        for row, advantage in enumerate(batch["advantages"].tolist()):
            source = batches[int(advantage // 10)]
            assert torch.equal(batch["completion_ids"][row], source["completion_ids"][int(advantage % 10)])


def test_trim_cuts_unused_columns_only() -> None:
    batch = micro_batches()[0]
    batch["completion_mask"] = (torch.arange(6)[None] < torch.tensor([1, 4, 2, 0])[:, None]).long()
    found = trim(batch)
    assert found["prompt_ids"].shape == (4, 2) and found["completion_ids"].shape == (4, 4)
    assert found["completion_mask"].sum() == batch["completion_mask"].sum()
    empty = {**batch, "completion_mask": torch.zeros(4, 6, dtype=torch.long)}
    assert trim(empty)["completion_ids"].shape == (4, 1)
