"""Our vLLM engine against the native one: same tokens, same log-probs, fresh weights; GRPO runs with it. ``make test-vllm``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "vllm", reason="vLLM lives in an environment of its own: make test-vllm", exc_type=ImportError
)

from algorist.config.schema import GRPOSection
from algorist.errors import EngineError
from algorist.extensions.vllm.engine import VLLMEngine
from algorist.extensions.vllm.section import ColocatedVLLMSection
from algorist.rollouts import SamplingParams, make_engine
from algorist.rollouts.collect import collect
from algorist.rollouts.native.engine import NativeEngine
from algorist.types import Problem
from tests.unit.rollouts.rollout_models import build, calling, fresh_log_probs, greedy_of_generate, prompts_of
from tests.unit.rollouts.test_conformance import Echo, decode

pytestmark = pytest.mark.vllm

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)
SMALL = ColocatedVLLMSection(kv_cache_memory_bytes=32 << 20)
GAP = 1e-3
"""Stated bound of |vLLM − policy| log-prob per token in float32; measured: 1.4e-5 at most."""


def made(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model with heads of 32 numbers, the fewest that vLLM's attention on CPU has."""
    return build(family, dtype, hidden_size=128, head_dim=32, **changes)


@cache
def shared() -> Any:
    return made("qwen3")


def engine_of(model: Any, **more: Any) -> VLLMEngine:
    return VLLMEngine(model, settings=SMALL, **more)


def gaps(model: Any, prompts: list[list[int]], groups: Any, temperature: float = 1.0) -> torch.Tensor:
    return torch.cat(
        [
            torch.tensor(c.log_probs) - fresh_log_probs(model, prompt, c.token_ids, temperature)
            for prompt, group in zip(prompts, groups, strict=True)
            for c in group
        ]
    ).abs()


@pytest.mark.parametrize("family", ["qwen2_tied", "llama", "gemma3", "gpt2", "qwen3"])
def test_greedy_tokens_are_the_native_engines(family: str) -> None:
    model, prompts = made(family), prompts_of()
    expected = NativeEngine(model).generate(prompts, 2, GREEDY)
    found = make_engine("vllm", model, section=GRPOSection(vllm=SMALL.model_dump())).generate(
        prompts, 2, GREEDY
    )
    assert [[c.token_ids for c in g] for g in found] == [[c.token_ids for c in g] for g in expected]
    assert len({t for g in expected for t in g[0].token_ids}) >= 15, "too plain to prove anything"
    assert gaps(model, prompts, found).max() <= GAP


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}, {"min_new_tokens": 4}],
    ids=["plain", "filtered", "least"],
)
def test_sampled_log_probs_are_the_policys_at_its_temperature(filters: dict[str, Any]) -> None:
    model, prompts = shared(), prompts_of()
    params = SamplingParams(temperature=0.7, max_new_tokens=16, seed=1, stop_token_ids=(3, 5, 8), **filters)
    groups = engine_of(model).generate(prompts, 6, params)
    assert gaps(model, prompts, groups, 0.7).max() <= GAP
    assert len({tuple(c.token_ids) for c in groups[1]}) == 6


def test_sampled_frequencies_follow_the_model() -> None:
    model, prompt = shared(), prompts_of((6,))[0]
    group = engine_of(model).generate(
        [prompt], 3000, SamplingParams(temperature=0.8, max_new_tokens=1, seed=0)
    )[0]
    with torch.no_grad():
        expected = (model(torch.tensor([prompt])).logits[0, -1] / 0.8).softmax(-1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in group]), minlength=len(expected)).float()
    # Five standard deviations of each count, and one for rounding.
    allowed = 5 * (3000 * expected * (1 - expected)).sqrt() + 1
    assert ((counts - 3000 * expected).abs() <= allowed).all()
    assert (counts > 0).sum() > 5


def test_weights_are_fresh_after_an_update_and_with_an_adapter() -> None:
    from peft import LoraConfig, get_peft_model

    model, prompts = made("qwen3"), prompts_of()
    engine = engine_of(model)
    before = engine.generate(prompts, 1, GREEDY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.tensor([prompts[1]]), labels=torch.tensor([prompts[1]])).loss.backward()
    optimizer.step()
    after = engine.generate(prompts, 1, GREEDY)
    assert after != before
    assert [g[0].token_ids for g in after] == [greedy_of_generate(model, p, 24) for p in prompts]

    kept = {name: p.clone() for name, p in model.named_parameters()}
    for dora in (False, True):
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], use_dora=dora)
        adapted = get_peft_model(made("qwen3"), config)
        with torch.no_grad():
            for name, p in adapted.named_parameters():
                if "lora_B" in name:
                    p.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
        state = {name: p.clone() for name, p in adapted.named_parameters()}
        groups = engine_of(adapted).generate(prompts, 1, GREEDY)
        assert [g[0].token_ids for g in groups] == [greedy_of_generate(adapted, p, 24) for p in prompts]
        with adapted.disable_adapter():
            plain = engine_of(adapted).generate(prompts, 1, GREEDY)
        assert plain == before != groups
        assert all(torch.equal(p, state[name]) for name, p in adapted.named_parameters())
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())


def test_seed_and_the_random_state_of_the_process() -> None:
    model, prompts = shared(), prompts_of()
    params = SamplingParams(max_new_tokens=12, seed=3)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first = engine_of(model).generate(prompts, 3, params)
    assert torch.equal(torch.get_rng_state(), state)
    assert [[c.token_ids for c in g] for g in engine_of(model).generate(prompts, 3, params)] == [
        [c.token_ids for c in g] for g in first
    ]
    other = engine_of(model).generate(prompts, 3, SamplingParams(max_new_tokens=12, seed=4))
    assert [[c.token_ids for c in g] for g in other] != [[c.token_ids for c in g] for g in first]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1  # vLLM has not taken the function away
    torch.set_num_threads(threads)


def test_more_prompt_tokens_than_one_step_holds() -> None:
    model, prompts = shared(), prompts_of((90, 100, 110, 120))
    params = SamplingParams(max_new_tokens=6, seed=1)
    engine = VLLMEngine(model, settings=SMALL.model_copy(update={"max_num_batched_tokens": 128}))
    groups = engine.generate(prompts, 8, params)
    assert gaps(model, prompts, groups).max() <= GAP
    again = engine.generate(prompts, 8, params)
    assert [[c.token_ids for c in g] for g in again] == [[c.token_ids for c in g] for g in groups]


def test_stop_tokens_stop_strings_and_the_end_of_the_context() -> None:
    def decode(ids: list[int]) -> str:
        return "".join(chr(97 + i // 12) + chr(97 + i % 12) for i in ids)

    model, prompts = shared(), prompts_of()
    plain = [greedy_of_generate(model, p, 24) for p in prompts]
    stop = plain[0][4]
    params = SamplingParams(temperature=0.0, max_new_tokens=24, stop_token_ids=(stop,))
    for expected, group in zip(plain, engine_of(model).generate(prompts, 2, params), strict=True):
        cut = expected[: expected.index(stop) + 1] if stop in expected else expected
        assert [c.token_ids for c in group] == [cut, cut]
        assert group[0].finish_reason == ("stop" if stop in expected else "length")

    string = decode(plain[0])[7:10]
    params = SamplingParams(temperature=0.0, max_new_tokens=24, stop_strings=(string, "never met"))
    for expected, group in zip(
        plain, engine_of(model, tokenizer=decode).generate(prompts, 1, params), strict=True
    ):
        ends = [n for n in range(1, 25) if string in decode(expected[:n])]
        assert group[0].token_ids == expected[: ends[0] if ends else 24]
        assert group[0].finish_reason == ("stop" if ends else "length")
    long = prompts_of((255, 240, 5))
    groups = engine_of(model).generate(long, 1, SamplingParams(temperature=0.0, max_new_tokens=30))
    assert [len(g[0].token_ids) for g in groups] == [1, 16, 30]


def test_bad_requests() -> None:
    engine = engine_of(shared())
    assert engine.generate([], 4, GREEDY) == []
    with pytest.raises(EngineError, match="prompt 1 is empty"):
        engine.generate([[5], []], 1, GREEDY)
    with pytest.raises(EngineError, match="prompt 0 has 256 tokens"):
        engine.generate([[5] * 256], 1, GREEDY)
    with pytest.raises(EngineError, match="no heads of 16 numbers, only of 32"):
        VLLMEngine(build("qwen3")).generate([[5]], 1, GREEDY)


def test_bfloat16_gap() -> None:
    model, prompts = made("qwen3", torch.bfloat16), prompts_of()
    groups = engine_of(model).generate(prompts, 4, SamplingParams(seed=0, max_new_tokens=16))
    gap = gaps(model, prompts, groups)
    assert 0 < gap.mean() < 0.1 and gap.max() < 1.0, (gap.mean(), gap.max())


DIGITS = """
def digits(completions, **_):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def few(completions, **_):
    return [float(sum(c in "xyzqjkvw" for c in text) >= 6) for text in completions]
"""


def run_grpo(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Run the command line; return the logged lines of GRPO."""
    (folder / "own.py").write_text(DIGITS)
    arguments = [
        "model.tiny={hidden_size: 64, heads: 2, kv_heads: 1, layers: 2}",
        "rewards=[{name: 'own.py:digits'}]",
        "grpo={batch_size: 32, group_size: 8, max_completion_tokens: 24, learning_rate: 1e-2, max_steps: 16}",
        "grpo.engine=vllm",
        *overrides,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "algorist.cli.main", "run", "smoke-cpu", *arguments, "run_name=r"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "runs/r/metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "reward" in row]


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_grpo_run_with_it_learns(adapter: bool, tmp_path: Path) -> None:
    lora = ["model.lora={rank: 16, target_modules: all-linear}", "grpo.learning_rate=3e-2"] if adapter else []
    rows = run_grpo(tmp_path, "grpo.vllm={kv_cache_memory_bytes: 33554432}", *lora)
    rewards = [row["reward"] for row in rows]
    assert len(rewards) == 16
    # An adapter on a random base moves it slowly.
    assert sum(rewards[-4:]) > (1.4 if adapter else 5) * sum(rewards[:4]), rewards
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) <= GAP
    # TRL's importance-sampling correction is on by default, and has nothing to correct in float32.
    assert all(abs(row["sampling/importance_sampling_ratio/mean"] - 1) <= GAP for row in rows)


def test_groups_without_a_signal_are_replaced_and_earlier_ones_used_again(tmp_path: Path) -> None:
    rows = run_grpo(
        tmp_path,
        "rewards=[{name: 'own.py:few'}]",
        "grpo.vllm={kv_cache_memory_bytes: 33554432}",
        "grpo.resample={when_below: 1, max_rounds: 6, max_share: 8}",
        "grpo.replay={max_age: 2}",
        "grpo.learning_rate=1e-4",
        "grpo.max_steps=4",
    )
    assert all(row["groups/refill_rounds"] > 0 for row in rows) and len(rows) == 4
    shares = [(row["groups/useful_share"], row["groups/trained_useful_share"]) for row in rows]
    assert all(trained >= 0.95 > sampled for sampled, trained in shares), shares
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) <= GAP


def test_turns_are_those_of_the_native_engine() -> None:
    """vLLM samples to a call and continues from the longer prompt: greedy tokens, spans and exchanges are the native engine's."""
    model, prompts = shared(), prompts_of((5, 12, 9))
    plain = [greedy_of_generate(model, p, 24) for p in prompts]
    params = replace(GREEDY, stop_token_ids=(plain[0][9],))
    call = decode([plain[0][3]])
    expected = NativeEngine(model, tokenizer=decode, tier="decoder").generate(prompts, 2, params, Echo(call))
    found = engine_of(model, tokenizer=decode).generate(prompts, 2, params, Echo(call))
    pairs = [pair for both in zip(expected, found, strict=True) for pair in zip(*both, strict=True)]
    for native, ours in pairs:
        assert (ours.token_ids, ours.sampled, ours.turns) == (native.token_ids, native.sampled, native.turns)
        assert ours.finish_reason == native.finish_reason
    assert any(native.sampled for native, _ in pairs)


def test_a_calculator_answers_in_the_native_engines_tokens() -> None:
    model, tokenizer, form = calling(hidden_size=128, head_dim=32)
    problems, params = [Problem("p", "q", "42")], SamplingParams(temperature=0.0, max_new_tokens=60)
    native = NativeEngine(model, tokenizer, tier="decoder")
    ours, theirs = (
        collect(engine, tokenizer, problems, form, params, 2)[0].rollouts
        for engine in (engine_of(model, tokenizer=tokenizer), native)
    )
    for here, there in zip(ours, theirs, strict=True):
        assert (here.completion_ids, here.sampled, here.text) == (
            there.completion_ids,
            there.sampled,
            there.text,
        )
        assert [(turn.request, turn.reply) for turn in here.turns] == [("12 + 30", "42")]
        assert here.grade is not None and here.grade.correct
