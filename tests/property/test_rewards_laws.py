"""Laws of the rewards: values stay in the declared range, nothing raises, nothing hangs, padding text changes nothing."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorist.prompts import FORMATS
from algorist.rewards import REWARDS, build_rewards

NAMES = [name for name in REWARDS if REWARDS.get(name).function.__module__.startswith("algorist.rewards.")]
PARTS = st.sampled_from(
    [
        "<reasoning>",
        "</reasoning>",
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "<start_working_out>",
        "<end_working_out>",
        "<SOLUTION>",
        "</SOLUTION>",
        "7",
        "-7",
        "7.0",
        "1,234",
        "1/2",
        "0",
        "nan",
        "inf",
        "1e400",
        "$7$",
        "\\boxed{7}",
        "\\boxed{",
        "\\frac{1}{2}",
        "####",
        "First,",
        "Next,",
        "words",
    ]
)
JOINS = st.sampled_from(["", " ", "\n", "\n\n"])
COMPLETIONS = st.one_of(
    st.text(max_size=60),
    st.lists(st.tuples(PARTS, JOINS), max_size=14).map(lambda parts: "".join(a + b for a, b in parts)),
)
GOLDS = st.one_of(
    st.sampled_from(["7", "-7", "0", "1,234", "\\frac{1}{2}", "$7$", "x+1", "nan"]),
    st.text(min_size=1, max_size=9),
)
PARAMS: dict[str, list[dict[str, object]]] = {
    "check_answer": [{"variant": v} for v in ("bounded", "origin", "notebook")],
    "check_numbers": [{"variant": v} for v in ("bounded", "origin", "notebook")],
    "cosine": [{}, {"max_len": 3, "correct_short": 0.2, "wrong_long": -3.0}, {"flipped": True}],
    "repetition": [{}, {"max_penalty": -2.0, "ngram": 1}],
    "xmlcount": [{}, {"floor": -0.01}],
    "accuracy": [{}, {"neutral": 0.0, "latex_gold_only": True}],
    "soft_overlong": [{}, {"max_tokens": 5, "cache_tokens": 5}, {"max_tokens": 5, "cache_tokens": 0}],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(completion=COMPLETIONS, gold=GOLDS, form=st.sampled_from(FORMATS.names()), ids=st.integers(0, 400))
def test_values_lie_in_the_declared_range(name: str, completion: str, gold: str, form: str, ids: int) -> None:
    for params in PARAMS.get(name, [{}]):
        one = build_rewards([{"name": name, "params": params}], form)[0]
        value = one(completions=[completion], answer=[gold], completion_ids=[[1] * ids])[0]
        assert value is not None and one.low <= value <= one.high
        says_itself = "neutral" in one.parameters  # what a missing gold answer pays
        assert one.failures == (0 if gold.strip() or says_itself or not one.needs_gold else 1)


@pytest.mark.parametrize("name", NAMES)
def test_default_range_is_the_declared_one(name: str) -> None:
    one = REWARDS.get(name)
    assert one.set_to({}) == ({}, one.low, one.high)


HOSTILE = {
    "opened": "<answer>" * 40_000,
    "boundaries": "<think></think><answer>" * 15_000,
    "reasoning": "<reasoning>" + "</reasoning><answer>" * 15_000,
    "blanks": "<think></think>" + " " * 300_000,
    "digits": "<answer>" + "9" * 200_000 + "</answer>",
    "nested": "\\boxed{" * 3_000 + "}" * 3_000,
    "dollars": "$" * 200_000,
    "lines": "\n-\n1." * 50_000,
    "words": "a " * 100_000,
    "surrogate": "<answer>\ud800</answer>",
    "nul": "<answer>\x00</answer>",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_text_neither_raises_nor_hangs(kind: str) -> None:
    for name in NAMES:
        one = build_rewards([name], "think_answer")[0]
        # Parsing is the prompt formats' work; here only that rewards pass their time on.
        text = HOSTILE[kind][: 20_000 if "parsed" in REWARDS.get(name).context else None]
        began = time.process_time()
        one(completions=[text], answer=["7"], completion_ids=[[1]])
        assert time.process_time() - began < 3.0, name
        assert one.failures == 0, name


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(COMPLETIONS, min_size=1, max_size=5), data=st.data())
def test_a_completion_is_judged_alone(texts: list[str], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(texts))))
    rewards = build_rewards(["correct", "xmlcount", "check_answer", "cosine"])
    together = rewards.score(texts, answer=["7"] * len(texts))
    shuffled = rewards.score([texts[i] for i in order], answer=["7"] * len(texts))
    assert [together[i] for i in order] == shuffled
    assert together == [rewards.explain(text, "7") for text in texts]


@settings(max_examples=30, deadline=None)
@given(completion=COMPLETIONS, weights=st.lists(st.floats(-5, 5), min_size=3, max_size=3))
def test_total_lies_in_the_bounds_of_the_set(completion: str, weights: list[float]) -> None:
    specs = [{"name": n, "weight": w} for n, w in zip(("cosine", "tag_fraction", "approx_format"), weights)]
    rewards = build_rewards(specs)
    low, high = rewards.bounds
    assert low - 1e-9 <= rewards.explain(completion, "7").total <= high + 1e-9
