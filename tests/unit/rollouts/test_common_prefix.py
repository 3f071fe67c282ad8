"""What all prompts of a request begin with is computed once: the same completions as with each prompt on its own."""

from __future__ import annotations

import random
from itertools import chain

import pytest
import torch

from algorist.rollouts import SamplingParams
from algorist.rollouts.native import decoder_tier
from algorist.rollouts.native.decoder import Decoder
from algorist.rollouts.native.decoder_tier import common_prefix
from algorist.rollouts.native.engine import NativeEngine
from tests.marks import first
from tests.unit.rollouts.rollout_models import FAMILIES, VOCAB, build, greedy_of, model_of

rng = random.Random(3)
SYSTEM = [rng.randrange(2, VOCAB) for _ in range(60)]
PROMPTS = [SYSTEM + [rng.randrange(2, VOCAB) for _ in range(size)] for size in (9, 1, 17, 4, 30, 9, 12)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=20, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("tier", first(1, ["decoder", "graph"]))
@pytest.mark.parametrize("family", [name for name, (*_, by_hand) in FAMILIES.items() if by_hand])
def test_greedy_equals_generate(family: str, tier: str) -> None:
    assert common_prefix(PROMPTS) == len(SYSTEM)
    found = NativeEngine(model_of(family), tier=tier).generate(PROMPTS, 2, GREEDY)
    for prompt, group in zip(PROMPTS, found, strict=True):
        assert [c.token_ids for c in group] == [greedy_of(family, prompt, 12)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, 300])  # 300 tokens: several waves, prompts come in later
def test_log_probs_are_those_without_it(monkeypatch: pytest.MonkeyPatch, budget: int | None) -> None:
    model = build("qwen3")
    with_prefix = NativeEngine(model, tier="decoder", token_budget=budget).generate(PROMPTS, 3, SAMPLED)
    monkeypatch.setattr(decoder_tier, "_PREFIX_SAVES", 10**9)
    without = NativeEngine(model, tier="decoder", token_budget=budget).generate(PROMPTS, 3, SAMPLED)
    for ours, theirs in zip(chain(*with_prefix), chain(*without), strict=True):
        assert ours.token_ids == theirs.token_ids
        torch.testing.assert_close(
            torch.tensor(ours.log_probs), torch.tensor(theirs.log_probs), atol=2e-5, rtol=0
        )


def test_bfloat16_is_as_close_to_float32_as_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = NativeEngine(build("qwen2"), tier="decoder").generate(PROMPTS, 1, GREEDY)
    model = build("qwen2", torch.bfloat16)

    def gap() -> float:
        found = NativeEngine(model, tier="decoder").generate(PROMPTS, 1, GREEDY)
        first = [abs(a.log_probs[0] - b.log_probs[0]) for (a,), (b,) in zip(found, exact, strict=True)]
        return sum(first) / len(first)

    shared = gap()
    monkeypatch.setattr(decoder_tier, "_PREFIX_SAVES", 10**9)
    assert shared < 0.05 and shared < 2 * gap() + 0.01


def test_it_goes_through_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    embed = Decoder._embed

    def count(self: Decoder, tokens: torch.Tensor) -> torch.Tensor:
        computed.append(len(tokens))
        return embed(self, tokens)

    engine = NativeEngine(model_of("qwen2"), tier="decoder")
    engine.tier_for(1)  # compares two short rows, once
    monkeypatch.setattr(Decoder, "_embed", count)
    engine.generate(PROMPTS, 2, GREEDY)
    padded = len(PROMPTS) * 30
    assert computed[:2] == [len(SYSTEM), padded]


def test_what_counts_as_a_prefix() -> None:
    long = list(range(2, 102))
    assert common_prefix([long]) == 0  # nothing to share it with
    assert common_prefix([long] * 4) == 0  # the same
    assert common_prefix([[*long, 7], [*long, 8], [*long, 8]]) == 0  # one pass for the prefix, one spared
    assert common_prefix([[*long, n] for n in range(5)]) == 100
    assert common_prefix([long[:50], *([*long, n] for n in range(8))]) == 49  # a token of each must remain
    assert common_prefix([[n, *long] for n in range(9)]) == 0
    assert common_prefix([(*long, 1), *([*long, n] for n in range(5))]) == 100
