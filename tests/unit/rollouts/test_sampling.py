"""Sampling as pure functions: the filters are those of transformers, the picks follow the weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from algorist.errors import ConfigError
from algorist.rollouts import SamplingParams
from algorist.rollouts.sampling import StopStrings, candidate_weights, draw_uniforms, pick, plan_waves, sample


def kept_by_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the filtered distribution as transformers' own warpers make it."""
    scores = logits / params.temperature
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return scores.softmax(-1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
)
def test_filters_are_those_of_transformers(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = 3 * torch.randn(1, 50, generator=torch.Generator().manual_seed(seed))
    expected = kept_by_transformers(logits, params)[0]
    # Evenly spread numbers: how often a token comes up is its probability to 1/4000.
    uniform = (torch.arange(4000) + 0.5) / 4000
    token, log_prob = sample(logits.repeat(4000, 1), uniform, params)
    found = torch.bincount(token, minlength=50) / 4000
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
    scaled = (logits / temperature).log_softmax(-1)[0]
    torch.testing.assert_close(log_prob, scaled[token], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [7, 256, 4096, 4099, 32000])
def test_pick_follows_the_weights_and_never_takes_zero(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    weight = torch.rand(1, size, generator=generator)
    weight[0, torch.randperm(size, generator=generator)[: size // 3]] = 0.0
    weight[0, -3:] = 0.0
    # Evenly spread numbers: each token, and each run of tokens, comes up as often as its weight says, to a draw or two.
    draws = 20_000
    uniform = (torch.arange(draws) + 0.5) / draws
    uniform[[0, -1]] = torch.tensor([0.0, 1 - 2.0**-20])
    token = torch.cat([pick(weight.expand(500, -1).contiguous(), part) for part in uniform.split(500)])
    assert bool((weight[0, token] > 0).all())
    error = torch.bincount(token, minlength=size) / draws - weight[0] / weight.sum()
    assert float(error.abs().max()) < 2 / draws
    assert float(error.cumsum(0).abs().max()) < 3 / draws


def test_one_certain_token_is_always_picked() -> None:
    for size in (5, 4096):
        for place in (0, size // 2, size - 1):
            weight = torch.zeros(64, size)
            weight[:, place] = 1e-30
            uniform = torch.cat([draw_uniforms(62, 1, 0).view(-1), torch.tensor([0.0, 1 - 2.0**-20])])
            assert bool((pick(weight, uniform) == place).all())


def test_top_p_beyond_the_first_candidates_sorts_everything() -> None:
    logits = torch.zeros(1, 5000)  # flat: 1024 candidates hold a fifth of the mass
    logits[0, 17] = 0.5
    params = SamplingParams(top_p=0.9)
    token, _ = sample(logits.repeat(1000, 1), draw_uniforms(1000, 1, 0).view(-1), params)
    assert len(token.unique()) > 700
    ranked = logits.log_softmax(-1).sort(descending=True).values
    kept = (candidate_weights(ranked, params) > 0).sum()
    assert abs(int(kept) - 4500) <= 2


def test_uniforms_of_a_seed_do_not_touch_the_global_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = draw_uniforms(3, 4, 9)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(draw_uniforms(5, 4, 9)[:3], first)  # more rows leave the first ones as they were
    assert float(first.max()) < 1


def test_params_are_checked() -> None:
    for wrong in (
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"top_k": -1},
        {"max_new_tokens": 0},
        {"min_new_tokens": 9, "max_new_tokens": 8},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SamplingParams(**wrong)  # type: ignore[arg-type]


def test_stop_strings_only_count_what_the_last_token_ends() -> None:
    texts = {1: "</ans", 2: "wer>", 3: "x", 4: "wer> and", 5: ""}
    found = StopStrings(("</answer>",), lambda ids: "".join(texts[i] for i in ids))
    assert found.just_ended([3, 1, 2])
    assert found.just_ended([1, 4])  # ends in the middle of a token
    assert not found.just_ended([1, 2, 3])  # ended one token ago
    assert not found.just_ended([1]) and not found.just_ended([])
    assert found.may_end(2) and found.may_end(5) and not found.may_end(3)


def test_waves_hold_every_row_once_within_the_budget() -> None:
    lengths = [3, 50, 20, 20]
    waves = plan_waves(lengths, 5, 10, 130)
    assert sorted(row for wave in waves for row in wave.rows) == list(range(20))
    for wave in waves:
        assert len(wave.rows) * (max(lengths[p] for p in wave.prompts) + 10) <= 130
        assert [wave.prompts[i] for i in wave.prompt_of_row] == [row // 5 for row in wave.rows]
    assert len(plan_waves(lengths, 5, 10, None)) == 1
