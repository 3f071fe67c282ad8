"""The native engine's own parts: choice of tier, fallbacks, schedule, memory, the cache."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
import transformers as hf

from algorist.errors import ConfigError, EngineError
from algorist.models.products import WIDE, bucket, fixed_linear, onednn_works
from algorist.rollouts import SamplingParams, make_engine
from algorist.rollouts.native import weights
from algorist.rollouts.native.decoder import Decoder
from algorist.rollouts.native.decoder_tier import ROWS_AT_A_TIME, plan_room
from algorist.rollouts.native.engine import NativeEngine, affordable_tokens
from algorist.rollouts.native.families import FAMILIES, Family
from algorist.rollouts.native.kv_cache import KVCache
from algorist.rollouts.native.weights import why_no_decoder
from algorist.rollouts.transformers import TransformersEngine
from tests.marks import first
from tests.unit.rollouts.rollout_models import PAD, VOCAB, build, greedy_of_generate, model_of, prompts_of

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)


def mamba() -> Any:
    torch.manual_seed(0)
    return hf.MambaForCausalLM(
        hf.MambaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            state_size=4,
            num_hidden_layers=1,
            pad_token_id=PAD,
            eos_token_id=None,
            bos_token_id=None,
        )
    )


def test_a_model_without_a_kv_cache_falls_back_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = mamba()
    with caplog.at_level(logging.INFO, logger="algorist.rollouts"):
        engine = make_engine("auto", model)
    assert isinstance(engine, TransformersEngine)
    assert [r.getMessage() for r in caplog.records] == [
        "rollouts of MambaForCausalLM go through model.generate: its forward takes no past_key_values"
    ]
    prompt = prompts_of((6,))[0]
    found = engine.generate([prompt], 2, SamplingParams(temperature=0.0, max_new_tokens=8))
    assert [c.token_ids for c in found[0]] == [greedy_of_generate(model, prompt, 8)] * 2
    with pytest.raises(EngineError, match="take engine=transformers"):
        NativeEngine(model)


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'native'"):
        make_engine("nativ", model_of("qwen2"))
    with pytest.raises(EngineError, match="Did you mean 'module'"):
        NativeEngine(model_of("qwen2"), tier="modul")
    assert isinstance(make_engine("transformers", model_of("qwen2")), TransformersEngine)


def test_the_reason_for_the_slower_tier_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine("auto", model_of("gemma2"))
    with caplog.at_level(logging.INFO, logger="algorist.rollouts"):
        for _ in range(2):
            engine.generate(prompts_of(), 1, SamplingParams(max_new_tokens=2))
    assert len(caplog.records) == 1 and "Gemma2ForCausalLM is not one of" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ministral3", "phi4_mini"])
def test_rows_beyond_a_change_with_the_position_take_the_models_own_forward(family: str) -> None:
    """Scores by position (Ministral 3), frequencies of long rows (Phi-4): both begin at 224 tokens here."""
    model = build(family)
    engine, prompt = NativeEngine(model), prompts_of((100,))[0]
    for new_tokens, tier in ((124, "decoder"), (140, "module")):
        assert engine.tier_for(100 + new_tokens).name == tier
        if tier == "module" and family == "phi4_mini":
            continue  # keys of one set of frequencies meet queries of the other: ``generate`` computes all of them anew
        found = engine.generate([prompt], 1, SamplingParams(temperature=0.0, max_new_tokens=new_tokens))
        assert found[0][0].token_ids == greedy_of_generate(model, prompt, new_tokens)


def test_a_forward_hook_is_not_bypassed() -> None:
    model = build("qwen2")
    assert why_no_decoder(model) is None
    handle = model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 0.0)
    assert why_no_decoder(model) == "a forward hook is registered on a Qwen2MLP"
    prompts = prompts_of()
    found = NativeEngine(model).generate(prompts, 1, GREEDY)
    assert [g[0].token_ids for g in found] == [greedy_of_generate(model, p, 24) for p in prompts]
    handle.remove()
    assert why_no_decoder(model) is None


def test_a_subclass_or_a_foreign_linear_is_not_taken_for_the_original() -> None:
    class Custom(hf.Qwen2ForCausalLM):
        pass

    assert "Custom is not one of" in str(why_no_decoder(Custom(model_of("qwen2").config)))
    model = build("qwen2")

    class Scaled(torch.nn.Linear):
        pass

    model.model.layers[0].mlp.up_proj = Scaled(48, 96, bias=False)
    assert "a linear layer is a" in str(why_no_decoder(model))
    assert "weights are of type torch.float64" in str(why_no_decoder(build("qwen2", torch.float64)))


class Own(hf.LlamaForCausalLM):
    """A user's class."""


def test_a_family_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = Own(model_of("llama").config), prompts_of()
    model.load_state_dict(model_of("llama").state_dict())
    assert "Own is not one of" in str(why_no_decoder(model))
    monkeypatch.setitem(FAMILIES, f"{__name__}.Own", Family())
    found = NativeEngine(model, tier="decoder").generate(prompts, 1, GREEDY)
    assert [g[0].token_ids for g in found] == [greedy_of_generate(model, p, 24) for p in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["auto", "decoder"])
def test_a_model_that_computes_something_else_is_found_out(
    tier: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The check at first use: a forward that no description tells, here of one MLP, leaves the model to itself."""
    model, prompts = build("gemma3"), prompts_of()
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: -type(mlp).forward(mlp, x)
    assert why_no_decoder(model) is None
    engine = NativeEngine(model, tier=tier)
    if tier == "decoder":
        with pytest.raises(EngineError, match="from its own forward's; take tier='auto'"):
            engine.generate(prompts, 1, GREEDY)
        return
    with caplog.at_level(logging.INFO, logger="algorist.rollouts"):
        found = engine.generate(prompts, 1, GREEDY)
    assert "go through its own forward: the decoder's log-probs are" in caplog.text
    assert [g[0].token_ids for g in found] == [greedy_of_generate(model, p, 24) for p in prompts]


def test_a_gate_by_silu_is_one_kernel_where_triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(weights, "why_no_triton", lambda: None)
    gates = {}
    for family in ("llama", "gemma3"):
        mlp = model_of(family).model.layers[0].mlp
        gates[family] = weights._gated(mlp.act_fn, torch.device("cuda")).__name__
    assert gates == {"llama": "silu_gated", "gemma3": "<lambda>"}


def test_a_models_first_call_says_how_much_of_it_is_done() -> None:
    """Its comparison with the decoder samples rows of its own."""
    engine, shares, over = NativeEngine(build("qwen2")), [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.0005):
            shares.append(engine.share())

    watching = threading.Thread(target=watch)
    watching.start()
    engine.generate(prompts_of(), 8, SamplingParams(max_new_tokens=60, seed=0))
    over.set()
    watching.join()
    while_it_ran = [share for share in shares if share]
    assert while_it_ran == sorted(while_it_ran) and len(set(shares)) > 5, shares


def test_a_shared_head_padded_beyond_the_vocabulary() -> None:
    model = build("qwen2")
    model.resize_token_embeddings(VOCAB + 24)
    model.config.vocab_size = VOCAB
    found = NativeEngine(model).generate(prompts_of(), 2, SamplingParams(max_new_tokens=16, seed=0))
    assert all(len(c.token_ids) == 16 for g in found for c in g)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "budget"),
    first(
        2,
        [("gemma3", 90), ("exaone4", 400), ("qwen3", 60), ("qwen3", 90), ("qwen3", 150), ("qwen3", 400)],
        together=True,
    ),
)
def test_refill_keeps_to_the_budget_and_finishes_every_row(family: str, budget: int) -> None:
    """Rows that end at different times, slots refilled while others run; the longest row spans many shifts."""
    model, prompts = model_of(family), prompts_of((5, 12, 9, 1, 17, 3, 8), seed=3)
    stop = (3, 9, 27, 81)
    params = SamplingParams(max_new_tokens=40, seed=11, stop_token_ids=stop)
    expected = NativeEngine(model, tier="module").generate(prompts, 4, params)
    found = NativeEngine(model, tier="decoder", token_budget=budget).generate(prompts, 4, params)
    assert [[c.token_ids for c in g] for g in found] == [[c.token_ids for c in g] for g in expected]
    assert len({len(c.token_ids) for g in found for c in g}) > 5


def test_plan_room() -> None:
    assert plan_room(4, 10, 8, 20, None) == (32, 4)
    for budget in (30, 31, 60, 200, 500):
        slots, places = plan_room(4, 10, 8, 20, budget)
        assert slots * 20 + places * 10 <= budget and slots >= 1
    with pytest.raises(
        EngineError, match="token budget is 29, but one row needs 10 prompt tokens and 20 new"
    ):
        plan_room(4, 10, 8, 20, 29)


def test_memory_gives_a_budget() -> None:
    model = model_of("qwen2")
    tokens = affordable_tokens(model, torch.device("cpu"))
    assert tokens is not None and 1e5 < tokens < 1e12


def test_cache_rows_survive_growth_moves_and_shifts() -> None:
    cache = KVCache(2, 2, 4, dtype=torch.float32, device=torch.device("cpu"))
    cache.set_slots(4)
    cache.grow_times(8)
    for layer in range(2):
        cache.keys[layer].copy_(
            torch.arange(8).view(1, 8, 1) + 100 * torch.arange(8).view(8, 1, 1) + 1000 * layer
        )
    before = [k.clone() for k in cache.keys]
    cache.grow_times(16)
    assert all(torch.equal(k[:, :8], b) for k, b in zip(cache.keys, before, strict=True))
    cache.move_rows(torch.tensor([3]), torch.tensor([1]))
    cache.set_slots(2)
    assert torch.equal(cache.keys[1][2:4, :8], before[1][6:8])
    cache.shift_times(3, 8)
    assert torch.equal(cache.keys[0][:2, :5], before[0][:2, 3:8])
    cache.set_slots(6)
    assert torch.equal(cache.keys[0][:2, :5], before[0][:2, 3:8])
    cache.set_prompts(3, 5)
    keys = torch.randn(2, 2, 5, 4)
    cache.write_prompts(0, torch.tensor([2, 0]), keys, -keys)
    cache.set_prompts(4, 9)
    assert torch.equal(cache.prompt_keys[0].view(4, 2, 9, 4)[[2, 0], :, :5], keys)
    cache.keep_prompts(torch.tensor([2]))
    assert torch.equal(cache.prompt_values[0].view(1, 2, 9, 4)[:, :, :5], -keys[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_fixed_linear_is_linear(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 40), torch.randn(24, 40), torch.randn(24)
    residual = torch.randn(rows, 24)
    linear, linear_add = fixed_linear(weight.to(dtype), bias.to(dtype), rows)
    expected = x.to(dtype).float() @ weight.to(dtype).float().T + bias.to(dtype).float()
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}
    torch.testing.assert_close(linear(x.to(dtype)).float(), expected, **tolerance)
    found = linear_add(x.to(dtype), residual.to(dtype)).float()
    torch.testing.assert_close(found, expected + residual.to(dtype).float(), **tolerance)


def test_buckets_are_few_and_large_enough() -> None:
    sizes = {bucket(n) for n in range(1, 257)}
    assert all(bucket(n) >= n and bucket(n) <= max(2 * n, n + 16) for n in range(1, 257)) and len(sizes) < 25


def test_onednn_is_found_where_torch_has_it() -> None:
    assert onednn_works(torch.float32) == torch.backends.mkldnn.is_available()
    assert not onednn_works(torch.float64)


def test_a_cpu_decodes_few_rows_of_a_wide_model_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of 256 problems takes the cache of 64, and each row the tokens that it has alone."""
    config = hf.Qwen2Config(
        vocab_size=64, hidden_size=WIDE, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.Qwen2ForCausalLM(config).eval()
    prompts = [[1 + i % 50, 2 + i % 7, 3] for i in range(100)]
    params = SamplingParams(max_new_tokens=12, seed=3, stop_token_ids=(5, 9, 11))
    most, step = [0], Decoder.step

    def counted(self: Decoder, token_S: torch.Tensor, *rest: Any) -> torch.Tensor:
        most.append(len(token_S))
        return step(self, token_S, *rest)

    monkeypatch.setattr(Decoder, "step", counted)
    completions = NativeEngine(model, tier="decoder").generate(prompts, 2, params)
    assert max(most) == ROWS_AT_A_TIME
    expected = NativeEngine(model, tier="module").generate(prompts, 2, params)
    assert [[c.token_ids for c in g] for g in completions] == [[c.token_ids for c in g] for g in expected]
