"""Every engine keeps the same promises: what ``generate`` says, the forward's log-probs, the stop rules, the seeds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from algorist.errors import EngineError
from algorist.rollouts import SamplingParams, make_engine
from algorist.rollouts.base import OutOfTime, Turns
from algorist.rollouts.collect import collect
from algorist.rollouts.native.engine import NativeEngine
from algorist.rollouts.transformers import TransformersEngine
from algorist.rollouts.turns import continued
from algorist.types import Problem, Turn
from tests.marks import first
from tests.unit.rollouts.rollout_models import (
    COVERED,
    FAMILIES,
    NEWER,
    VOCAB,
    build,
    calling,
    fresh_log_probs,
    greedy_of,
    greedy_of_generate,
    model_of,
    prompts_of,
)

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)
WITHIN = 1e-5
"""Between log-probs in float32; products of another library round otherwise."""

Make = Callable[..., Any]
ENGINES: dict[str, Make] = {
    "decoder": lambda model, **k: NativeEngine(model, tier="decoder", **k),
    # Room for a few rows only: rows wait, slots are refilled while others run.
    "decoder_refill": lambda model, **k: NativeEngine(model, tier="decoder", **{"token_budget": 130, **k}),
    # The step that CUDA captures as a graph, run directly.
    "graph": lambda model, **k: NativeEngine(model, tier="graph", **k),
    "graph_refill": lambda model, **k: NativeEngine(model, tier="graph", **{"token_budget": 130, **k}),
    "module": lambda model, **k: NativeEngine(model, tier="module", **k),
    "module_waves": lambda model, **k: NativeEngine(model, tier="module", **{"token_budget": 120, **k}),
    "transformers": lambda model, **k: TransformersEngine(model, **k),
}
BY_HAND = [name for name in ENGINES if "decoder" in name or "graph" in name]


# Its own promises are those of graph; where rows wait, two tests suffice.
@pytest.fixture(params=[name for name in ENGINES if name != "graph_refill"])
def make(request: pytest.FixtureRequest) -> Make:
    return ENGINES[request.param]


def pairs() -> list[Any]:
    """Each family on each engine that covers it; what differs little from others is for ``make test-long``."""
    return [
        pytest.param(
            family,
            engine,
            id=f"{family}-{engine}",
            marks=[pytest.mark.long]
            if engine in ("module", "transformers")
            or (engine == "module_waves" and (covered or family not in ("gpt_oss", "qwen3_5")))
            else [],
        )
        for family, (_, _, _, covered) in FAMILIES.items()
        for engine in ENGINES
        if covered or engine not in BY_HAND
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "engine"), pairs())
def test_greedy_equals_generate(family: str, engine: str) -> None:
    model, prompts = model_of(family), prompts_of()
    groups = ENGINES[engine](model).generate(prompts, 3, GREEDY)
    expected = [greedy_of(family, p) for p in prompts]
    assert [[c.token_ids for c in group] for group in groups] == [[e] * 3 for e in expected]
    assert len({t for e in expected for t in e}) >= 20, (
        "the model's greedy output is too plain to prove anything"
    )
    # transformers computes a gated delta rule in chunks or token by token, which round otherwise.
    within = 5e-5 if family == "qwen3_5" else WITHIN
    for prompt, group in zip(prompts, groups, strict=True):
        found = torch.tensor(group[0].log_probs)
        torch.testing.assert_close(
            found, fresh_log_probs(model, prompt, group[0].token_ids), atol=within, rtol=0
        )


@pytest.mark.slow
@pytest.mark.parametrize("engine", first(1, ["graph", "decoder"]))
@pytest.mark.parametrize("family", first(1, NEWER))
def test_greedy_tokens_stay_equal_over_long_completions(family: str, engine: str) -> None:
    """64 rows of 200 tokens, 25 times as long as the window of those that have one."""
    prompts = prompts_of()
    groups = ENGINES[engine](model_of(family)).generate(
        prompts, 16, SamplingParams(temperature=0.0, max_new_tokens=200)
    )
    for prompt, group in zip(prompts, groups, strict=True):
        tokens = group[0].token_ids
        assert [c.token_ids for c in group] == [tokens] * 16
        with torch.no_grad():
            logs = (
                model_of(family)(torch.tensor([prompt + tokens]))
                .logits[0, len(prompt) - 1 : -1]
                .log_softmax(-1)
            )
        assert logs.argmax(-1).tolist() == tokens
        for completion in group[::15]:
            found = torch.tensor(completion.log_probs)
            torch.testing.assert_close(found, logs.max(-1).values, atol=WITHIN, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2"])
def test_sampled_log_probs_are_the_forwards(family: str, make: Make) -> None:
    model, prompts = model_of(family), prompts_of()
    if make in [ENGINES[name] for name in BY_HAND] and family not in COVERED:
        with pytest.raises(EngineError, match="hand-written decoder cannot run"):
            make(model)
        return
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, max_new_tokens=20, seed=1)
    for prompt, group in zip(prompts, make(model).generate(prompts, 4, params), strict=True):
        for completion in group:
            expected = fresh_log_probs(model, prompt, completion.token_ids, 0.7)
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=WITHIN, rtol=0)
    assert len({tuple(c.token_ids) for c in group}) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=20, seed=1),
        GREEDY,
        *first(
            0,
            [
                SamplingParams(max_new_tokens=20, seed=1, top_p=0.9, top_k=20),
                SamplingParams(max_new_tokens=20, seed=1, top_p=0.5, min_new_tokens=3),
                SamplingParams(max_new_tokens=20, seed=1, min_p=0.01),
            ],
        ),
    ],
    ids=["plain", "greedy", "top_k", "top_p", "min_p"],
)
def test_ids_that_the_tokenizer_lacks_are_never_sampled(make: Make, params: SamplingParams) -> None:
    """A head padded beyond the tokenizer: its rows stay in the softmax, as in training, and no text is made of them."""
    model, prompts, ids = model_of("llama"), prompts_of(), VOCAB // 2
    prompts = [[token % ids for token in prompt] for prompt in prompts]
    tokenizer = SimpleNamespace(get_vocab=lambda: {str(i): i for i in range(ids)}, decode=str)
    groups = make(model, tokenizer=tokenizer).generate(prompts, 4, params)
    free = make(model).generate(prompts, 4, params)
    assert max(t for group in free for c in group for t in c.token_ids) >= ids
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            assert max(completion.token_ids) < ids
            expected = fresh_log_probs(model, prompt, completion.token_ids, params.temperature or 1.0)
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=WITHIN, rtol=0)


@pytest.mark.slow
def test_engines_agree_on_sampled_tokens() -> None:
    """One uniform number per token decides, so every engine draws the same rollouts from a seed."""
    model, prompts = model_of("qwen3"), prompts_of()
    params = SamplingParams(max_new_tokens=20, seed=5, stop_token_ids=(7, 9, 11))
    found = [
        [[c.token_ids for c in group] for group in make(model).generate(prompts, 4, params)]
        for make in ENGINES.values()
    ]
    assert all(f == found[0] for f in found)


@pytest.mark.slow
def test_seed(make: Make) -> None:
    engine, prompts = make(model_of("llama")), prompts_of()
    params = SamplingParams(max_new_tokens=12, seed=3)
    first, again = engine.generate(prompts, 2, params), engine.generate(prompts, 2, params)
    other = engine.generate(prompts, 2, SamplingParams(max_new_tokens=12, seed=4))
    assert first == again
    assert first != other
    torch.manual_seed(0)
    free = engine.generate(prompts, 2, SamplingParams(max_new_tokens=12))
    following = engine.generate(prompts, 2, SamplingParams(max_new_tokens=12))
    torch.manual_seed(0)
    assert engine.generate(prompts, 2, SamplingParams(max_new_tokens=12)) == free
    assert following != free


@pytest.mark.slow
def test_greedy_does_not_depend_on_the_batch(make: Make) -> None:
    engine, prompts = make(model_of("qwen3")), prompts_of((5, 12, 9, 1, 17, 3))
    together = {i: g[0].token_ids for i, g in enumerate(engine.generate(prompts, 2, GREEDY))}
    order = [4, 2, 0, 5]
    some = engine.generate([prompts[i] for i in order], 1, GREEDY)
    assert [g[0].token_ids for g in some] == [together[i] for i in order]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["decoder", "graph", "module", "transformers"])
def test_sampled_frequencies_follow_the_model(engine: str) -> None:
    """Chi-square of the first and second token's counts at temperature 0.8 against the model's distribution."""
    model, prompt = model_of("llama"), prompts_of((6,))[0]
    params = SamplingParams(temperature=0.8, max_new_tokens=2, seed=0)
    group = ENGINES[engine](model).generate([prompt], 4000, params)[0]
    with torch.no_grad():
        expected = (model(torch.tensor([prompt])).logits[0, -1] / 0.8).softmax(-1)
        first = int(expected.argmax())
        second = (model(torch.tensor([[*prompt, first]])).logits[0, -1] / 0.8).softmax(-1)
    _assert_chi_square(torch.tensor([c.token_ids[0] for c in group]), expected)
    after = torch.tensor([c.token_ids[1] for c in group if c.token_ids[0] == first])
    _assert_chi_square(after, second)


def _assert_chi_square(sampled: torch.Tensor, probability: torch.Tensor) -> None:
    counts, wanted = torch.bincount(sampled, minlength=VOCAB).double(), probability.double() * len(sampled)
    common = wanted >= 5
    counts = torch.cat([counts[common], counts[~common].sum().view(1)])
    wanted = torch.cat([wanted[common], wanted[~common].sum().view(1)]).clamp_min(1e-9)
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    # Wilson-Hilferty: the 99.9 % point of chi-square.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert freedom >= 5 and statistic < limit, (statistic, limit, freedom)


def test_stop_token_ends_a_row_and_is_kept(make: Make) -> None:
    model, prompts = model_of("qwen3"), prompts_of()
    plain = [greedy_of("qwen3", p) for p in prompts]
    stop = plain[0][4]
    params = SamplingParams(temperature=0.0, max_new_tokens=24, stop_token_ids=(stop,))
    groups = make(model).generate(prompts, 2, params)
    for expected, group in zip(plain, groups, strict=True):
        cut = expected[: expected.index(stop) + 1] if stop in expected else expected
        for completion in group:
            assert completion.token_ids == cut
            assert len(completion.log_probs) == len(cut)
            assert completion.finish_reason == ("stop" if stop in expected else "length")
    assert groups[0][0].finish_reason == "stop"


@pytest.mark.slow
def test_end_tokens_and_nothing_else_of_the_generation_config(make: Make) -> None:
    model, prompts = build("qwen3"), prompts_of()
    plain = [greedy_of("qwen3", p) for p in prompts]
    end = plain[0][5]
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.suppress_tokens = [plain[0][0]]
    for stops in ([end], [end, plain[1][3]], []):
        model.generation_config.eos_token_id = stops or None
        groups = make(model).generate(prompts, 1, GREEDY)
        for expected, group in zip(plain, groups, strict=True):
            cut = next((i + 1 for i, t in enumerate(expected) if t in stops), 24)
            assert group[0].token_ids == expected[:cut]
    assert model.generation_config.repetition_penalty == 5.0


def decode(ids: list[int]) -> str:
    """A tokenizer of two letters per token: aa, ab, ac …"""
    return "".join(chr(97 + i // 12) + chr(97 + i % 12) for i in ids)


def test_stop_string_spanning_tokens(make: Make) -> None:
    model, prompts = model_of("qwen3"), prompts_of()
    plain = [greedy_of("qwen3", p) for p in prompts]
    text = decode(plain[0])
    string = text[7:10]  # begins inside the fourth token, ends with the fifth
    params = SamplingParams(temperature=0.0, max_new_tokens=24, stop_strings=(string, "never met"))
    groups = make(model, tokenizer=decode).generate(prompts, 2, params)
    for expected, group in zip(plain, groups, strict=True):
        ends = [n for n in range(1, 25) if string in decode(expected[:n])]
        assert group[0].token_ids == group[1].token_ids == expected[: ends[0] if ends else 24]
        assert group[0].finish_reason == ("stop" if ends else "length")
    assert groups[0][0].finish_reason == "stop"
    with pytest.raises(EngineError, match="need a tokenizer"):
        make(model).generate(prompts, 1, params)


def test_min_new_tokens_bars_the_stop_tokens(make: Make) -> None:
    model, prompts = model_of("qwen3"), prompts_of()
    stop = tuple(range(0, VOCAB, 2))
    params = SamplingParams(max_new_tokens=12, min_new_tokens=6, stop_token_ids=stop, seed=2)
    for prompt, group in zip(prompts, make(model).generate(prompts, 3, params), strict=True):
        for completion in group:
            assert len(completion.token_ids) >= 6
            assert all(t not in stop for t in completion.token_ids[:6])
            expected = fresh_log_probs(model, prompt, completion.token_ids)
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=WITHIN, rtol=0)
    assert any(c.finish_reason == "stop" for c in group)


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.9999}])
def test_the_narrowest_filter_is_greedy(filters: dict[str, Any], make: Make) -> None:
    model, prompts = model_of("llama"), prompts_of()
    found = make(model).generate(prompts, 1, SamplingParams(max_new_tokens=10, seed=0, **filters))
    assert [g[0].token_ids for g in found] == [greedy_of("llama", p, 10) for p in prompts]


@pytest.mark.slow
def test_weights_changed_by_an_optimizer_step_are_seen(make: Make) -> None:
    model, prompts = build("qwen3"), prompts_of((12, 9))
    engine = make(model)

    def assert_greedy(groups: Any) -> None:
        expected = [[greedy_of_generate(model, prompt, 24)] * 2 for prompt in prompts]
        assert [[c.token_ids for c in group] for group in groups] == expected

    before = engine.generate(prompts, 2, GREEDY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.tensor([prompts[0]]), labels=torch.tensor([prompts[0]])).loss.backward()
    optimizer.step()
    after = engine.generate(prompts, 2, GREEDY)
    assert after != before
    assert_greedy(after)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(0.9)  # through .data: no version counter tells
    last = engine.generate(prompts, 2, GREEDY)
    assert_greedy(last)


@pytest.mark.slow
@pytest.mark.parametrize("dora", first(1, [False, True]))
def test_lora_is_active_and_followed(dora: bool, make: Make) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.5, use_dora=dora
    )
    prompts = prompts_of((12, 9))
    model = get_peft_model(build("qwen3"), config)
    model.train()
    if dora and make in [ENGINES[name] for name in BY_HAND]:
        with pytest.raises(EngineError, match="LoRA variant"):
            make(model)
        return
    engine = make(model)
    plain = engine.generate(prompts, 1, GREEDY)
    for _ in range(2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(
                        0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                    )
        groups = engine.generate(prompts, 2, GREEDY)
        assert groups != [[g[0], g[0]] for g in plain]
        for prompt, group in zip(prompts, groups, strict=True):
            assert group[0].token_ids == greedy_of_generate(model, prompt, 24)
            expected = fresh_log_probs(model, prompt, group[0].token_ids)
            torch.testing.assert_close(torch.tensor(group[0].log_probs), expected, atol=2e-5, rtol=1e-5)
    with model.disable_adapter():
        for (without,), (before,) in zip(engine.generate(prompts, 1, GREEDY), plain, strict=True):
            assert without.token_ids == before.token_ids
            assert without.log_probs == pytest.approx(before.log_probs, abs=2e-5)
    assert model.training


def test_bfloat16(make: Make) -> None:
    model, prompts = build("qwen3", torch.bfloat16), prompts_of()
    gaps = []
    for prompt, group in zip(
        prompts, make(model).generate(prompts, 4, SamplingParams(seed=0, max_new_tokens=16)), strict=True
    ):
        for completion in group:
            gaps.append(
                torch.tensor(completion.log_probs) - fresh_log_probs(model, prompt, completion.token_ids)
            )
    gap = torch.cat(gaps).abs()
    assert 0 < gap.mean() < 0.1 and gap.max() < 1.0, (gap.mean(), gap.max())


def test_the_model_is_left_as_it_was(make: Make) -> None:
    model = build("qwen2")
    model.train()
    model.model.layers[0].mlp.eval()
    model.gradient_checkpointing_enable()
    flags = [m.training for m in model.modules()]
    state = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        groups = make(model).generate(prompts_of(), 2, GREEDY)
    assert [g[0].token_ids for g in groups] == [greedy_of("qwen2", p) for p in prompts_of()]
    assert [m.training for m in model.modules()] == flags
    assert model.is_gradient_checkpointing
    assert all(torch.equal(state[n], p) and p.grad is None for n, p in model.named_parameters())
    ids = torch.tensor(prompts_of()[1:2])
    model(ids, labels=ids).loss.backward()  # no inference tensor is left in the model
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
def test_a_call_ends_at_its_deadline_and_the_next_one_is_as_before(make: Make) -> None:
    """Between two tokens, whatever the model's size; tokens are counted meanwhile."""
    model = build("qwen2", max_position_embeddings=30_000)
    engine, counted, over = make(model, token_budget=200_000), [], threading.Event()
    before = engine.generate(prompts_of(), 2, GREEDY)
    watch = threading.Thread(
        target=lambda: [counted.append(engine.tokens()) for _ in iter(lambda: over.wait(0.01), True)]
    )
    endless = replace(GREEDY, max_new_tokens=20_000, min_new_tokens=20_000, until=time.monotonic() + 1.0)
    watch.start()
    with pytest.raises(OutOfTime, match=r"after [1-9]\d* tokens"):
        engine.generate(prompts_of(), 2, endless)
    assert time.monotonic() < endless.until + 2
    over.set()
    watch.join()
    assert max(counted) > 0
    assert engine.generate(prompts_of(), 2, GREEDY) == before


def test_a_long_completion_ends_with_the_context(make: Make) -> None:
    model = build("qwen2", max_position_embeddings=32)
    prompts = prompts_of((31, 20, 5))
    groups = make(model).generate(prompts, 1, SamplingParams(temperature=0.0, max_new_tokens=30))
    assert [len(g[0].token_ids) for g in groups] == [1, 12, 27]
    assert {g[0].finish_reason for g in groups} == {"length"}


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_a_table_of_positions_is_never_left(engine: str) -> None:
    """Rows of another length in the batch do not run on beyond the context, where GPT-2 has no position."""
    model = build("gpt2", max_position_embeddings=32)
    groups = make_engine(engine, model).generate(
        prompts_of((31, 20, 5)), 1, SamplingParams(temperature=0.0, max_new_tokens=30)
    )
    assert [len(g[0].token_ids) for g in groups] == [1, 12, 27]


def test_bad_requests(make: Make) -> None:
    model = model_of("qwen2")
    engine = make(model)
    assert engine.generate([], 4, GREEDY) == []
    with pytest.raises(EngineError, match="prompt 1 is empty"):
        engine.generate([[5], []], 1, GREEDY)
    with pytest.raises(EngineError, match=r"prompt 0 has 256 tokens, but the model's context holds 256"):
        engine.generate([[5] * 256], 1, GREEDY)
    with pytest.raises(EngineError, match="token id 128; expected 0 … 127"):
        engine.generate([[5, 128]], 1, GREEDY)
    with pytest.raises(EngineError, match="group_size is 0"):
        engine.generate([[5]], 0, GREEDY)
    with pytest.raises(
        EngineError, match=r"token budget is 20, but one row needs 12 prompt tokens and 24 new"
    ):
        make(model, token_budget=20).generate(prompts_of(), 1, GREEDY)


def test_auto_engine_on_every_family() -> None:
    for family, (_, _, _, covered) in FAMILIES.items():
        engine = make_engine("auto", model_of(family))
        assert isinstance(engine, NativeEngine), family
        assert (engine.tier_for(100).name == "decoder") == covered, family


class Echo:
    """Replies by what it gets: to a call with up to four tokens or none, to an end once, and ends a row at its fourth call."""

    def __init__(self, *stop_strings: str) -> None:
        self.stop_strings = stop_strings
        self.begun = 0

    def begin(self, rows: int) -> None:
        self.begun += 1
        self.turns: list[tuple[Turn, ...]] = [()] * rows

    def reply(self, row: int, token_ids: list[int], ended: bool) -> Iterator[int] | None:
        calls = [turn.source for turn in self.turns[row]]
        if len(calls) >= 4 or (ended and "end" in calls):
            return None
        tokens = [(sum(token_ids) + 7 * i) % VOCAB for i in range(sum(token_ids) % 3)]
        turn = Turn("end" if ended else "call", decode(token_ids), decode(tokens))
        self.turns[row] = (*self.turns[row], turn)
        return iter(tokens)

    def turns_of(self, row: int) -> tuple[Turn, ...]:
        return self.turns[row]


def continued_engine(model: Any, **settings: Any) -> Any:
    """Return the native engine as one that only knows prompts, as vLLM is."""
    engine = NativeEngine(model, tier="decoder", **settings)

    def generate(prompts: Any, size: int, params: SamplingParams, turns: Turns | None = None) -> Any:
        return continued(engine.generate, prompts, size, params, turns, decode) if turns else None

    return SimpleNamespace(generate=generate)


def by_hand(model: Any, prompt: list[int], stops: set[int], call: str, limit: int) -> Any:
    """Return tokens, which of them were sampled, and whether the row stopped: one full forward a token."""
    turns, ids, own = Echo(call), [], []
    turns.begin(1)
    segment: list[int] = []
    while len(ids) < limit:
        with torch.no_grad():
            token = int(model(torch.tensor([prompt + ids])).logits[0, -1].argmax())
        before = decode(segment).count(call)
        ids, own, segment = [*ids, token], [*own, True], [*segment, token]
        called = decode(segment).count(call) > before
        if len(ids) == limit or not (token in stops or called):
            continue
        reply = turns.reply(0, segment, token in stops)
        if reply is None:
            return ids, own, "stop", turns.turns_of(0)
        tokens = list(reply)[: limit - len(ids)]
        ids, own, segment = ids + tokens, own + [False] * len(tokens), [] if tokens else segment
    return ids, own, "length", turns.turns_of(0)


TURN_ENGINES = {**ENGINES, "continued": continued_engine}


@pytest.mark.slow
@pytest.mark.parametrize("engine", TURN_ENGINES)
def test_turns_are_appended_and_continued_from(engine: str) -> None:
    """Calls, replies of no tokens, a reply after the end, a row that its replier ends, replies cut by the length: one reference."""
    model, prompts = model_of("qwen3"), prompts_of((5, 12, 9, 1, 17, 3))
    plain = [greedy_of("qwen3", p) for p in prompts]
    call, stops = decode([plain[0][3]]), {plain[0][9], plain[3][6]}
    params = SamplingParams(temperature=0.0, max_new_tokens=24, stop_token_ids=tuple(stops))
    turns = Echo(call)
    expected = [by_hand(model, p, stops, call, 24) for p in prompts]
    groups = TURN_ENGINES[engine](model, tokenizer=decode).generate(prompts, 2, params, turns)
    for group, (ids, own, reason, exchanges) in zip(groups, expected, strict=True):
        for completion in group:
            assert completion.token_ids == ids
            assert completion.finish_reason == reason
            assert (completion.sampled or [True] * len(ids)) == own
            assert completion.turns == exchanges
            found = torch.tensor(completion.log_probs)
            assert found.isnan().tolist() == [not mine for mine in own]
            fresh = fresh_log_probs(model, prompts[groups.index(group)], ids)
            torch.testing.assert_close(found[own], fresh[own], atol=WITHIN, rtol=0)
    kinds = {turn.source for *_, exchanges in expected for turn in exchanges}
    replies = {bool(turn.reply) for *_, exchanges in expected for turn in exchanges}
    reasons = {reason for *_, reason, _ in expected}
    assert kinds == {"call", "end"} and replies == {True, False} and reasons == {"stop", "length"}
    assert turns.begun == 1


@cache
def known_call() -> tuple[Any, Any, Any]:
    return calling()


@pytest.mark.slow
@pytest.mark.parametrize("engine", [name for name in TURN_ENGINES if name != "continued"])
def test_a_calculator_answers_in_the_same_tokens(engine: str) -> None:
    model, tokenizer, form = known_call()
    problems, greedy = [Problem("p", "q", "42")], SamplingParams(temperature=0.0, max_new_tokens=60)
    own = TURN_ENGINES[engine](model, tokenizer=tokenizer)
    (group,) = collect(own, tokenizer, problems, form, greedy, 2)
    for rollout in group.rollouts:
        assert rollout.text == "<calculator>12 + 30</calculator><output>42</output> so <answer>42</answer>"
        assert [(turn.request, turn.reply) for turn in rollout.turns] == [("12 + 30", "42")]
        assert rollout.grade is not None and rollout.grade.correct
        written = [i for i, own in zip(rollout.completion_ids, rollout.sampled_mask, strict=True) if own]
        assert (
            tokenizer.decode(written)
            == f"<calculator>12 + 30</calculator> so <answer>42</answer>{tokenizer.eos_token}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "graph_refill"])
def test_sampled_tokens_with_turns_do_not_depend_on_the_batch(engine: str) -> None:
    """A token's place decides its random number, whoever put the tokens before it there."""
    model, prompts = model_of("llama"), prompts_of((5, 12, 9, 4))
    params = SamplingParams(max_new_tokens=20, seed=5)
    plain = NativeEngine(model, tier="decoder").generate(prompts, 3, params)
    call = decode([plain[1][0].token_ids[2]])
    found = ENGINES[engine](model, tokenizer=decode).generate(prompts, 3, params, Echo(call))
    assert any(c.sampled for group in found for c in group)
    pairs = [pair for both in zip(plain, found, strict=True) for pair in zip(*both, strict=True)]
    for before, after in pairs:
        same = next((i for i, own in enumerate(after.sampled or []) if not own), len(after.token_ids))
        assert after.token_ids[:same] == before.token_ids[:same]
        if after.sampled is None:
            assert after.token_ids == before.token_ids
    reference = ENGINES["decoder"](model, tokenizer=decode).generate(prompts, 3, params, Echo(call))
    assert [[c.token_ids for c in g] for g in found] == [[c.token_ids for c in g] for g in reference]
