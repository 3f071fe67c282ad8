"""The engine that samples by MLX keeps the promises of every engine, and hands over only the weights that have changed. ``make test-mlx``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip(
    "mlx.core", reason="MLX lives in an environment of its own: make test-mlx", exc_type=ImportError
)
pytest.importorskip("mlx_lm", reason="mlx-lm lives in an environment of its own: make test-mlx")

import mlx.core as mx

from algorist.errors import EngineError
from algorist.extensions.mlx.engine import MLXEngine
from algorist.extensions.mlx.sampling import choose
from algorist.extensions.mlx.weights import Mirror
from algorist.rollouts import SamplingParams, make_engine
from algorist.rollouts.sampling import draw_uniforms, sample
from tests.unit.rollouts import test_conformance as promises
from tests.unit.rollouts.rollout_models import (
    FAMILIES,
    build,
    fresh_log_probs,
    greedy_of_generate,
    model_of,
    prompts_of,
)

# Collected here too, where ``make`` is MLX's engine.
from tests.unit.rollouts.test_conformance import (  # noqa: F401
    test_a_call_ends_at_its_deadline_and_the_next_one_is_as_before,
    test_a_long_completion_ends_with_the_context,
    test_bad_requests,
    test_bfloat16,
    test_end_tokens_and_nothing_else_of_the_generation_config,
    test_greedy_does_not_depend_on_the_batch,
    test_ids_that_the_tokenizer_lacks_are_never_sampled,
    test_lora_is_active_and_followed,
    test_min_new_tokens_bars_the_stop_tokens,
    test_seed,
    test_stop_string_spanning_tokens,
    test_stop_token_ends_a_row_and_is_kept,
    test_the_model_is_left_as_it_was,
    test_the_narrowest_filter_is_greedy,
    test_weights_changed_by_an_optimizer_step_are_seen,
)

pytestmark = pytest.mark.mlx

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)
SAMPLED = [
    "qwen2", "qwen2_tied", "qwen3", "llama", "llama_llama3_rope", "qwen3_yarn", "mistral", "ministral3", "gemma3", "smollm3", "olmo2",
    "granite", "lfm2", "qwen3_5",
]  # fmt: skip
REFUSED = {
    "gemma": r"not the model that torch trains: its log-probs are \d\.\de-04",
    "mistral_window": "other attention windows than the policy from 8 tokens on",
    "ministral": "mlx-lm has no model of the type 'ministral'",
    "olmo3": "not the model that torch trains",
    "exaone4": "mlx-lm cannot make its exaone4 of this Exaone4ForCausalLM",
    "phi4_mini": "not the model that torch trains",
    "llama_dynamic_rope": "cannot sample this LlamaForCausalLM in a batch",
    "gemma2": "not the model that torch trains",
    "gpt2": "mlx-lm cannot make its gpt2 of this GPT2LMHeadModel",
    "mixtral": "parameters not in model",
    "gpt_oss": "parameters not in model",
}


def waves(model: Any, **settings: Any) -> MLXEngine:
    """Return an engine with room for a few rows only."""
    return MLXEngine(model, **{"token_budget": 120, **settings})


ENGINES: dict[str, Callable[..., MLXEngine]] = {"mlx": MLXEngine, "mlx_waves": waves}


@pytest.fixture(params=list(ENGINES))
def make(request: pytest.FixtureRequest) -> Callable[..., MLXEngine]:
    return ENGINES[request.param]


@pytest.fixture(autouse=True)
def _mlx_rounds_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured: 1.4e-5 at most, in one token of some thousands."""
    monkeypatch.setattr(promises, "WITHIN", 3e-5)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests that take an engine by its name find ours."""
    for name, made in ENGINES.items():
        monkeypatch.setitem(promises.ENGINES, name, made)
        monkeypatch.setitem(promises.TURN_ENGINES, name, made)


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("family", SAMPLED)
def test_greedy_tokens_and_log_probs_are_the_models_own(family: str) -> None:
    promises.test_greedy_equals_generate(family, "mlx")


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "smollm3", "granite", "ministral3", "lfm2"])
def test_greedy_tokens_stay_equal_over_long_completions(family: str) -> None:
    promises.test_greedy_tokens_stay_equal_over_long_completions(family, "mlx")


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_sampled_log_probs_are_the_forwards(family: str, make: Callable[..., MLXEngine]) -> None:
    promises.test_sampled_log_probs_are_the_forwards(family, make)


@pytest.mark.usefixtures("beside")
def test_the_tokens_of_a_seed_are_those_of_every_engine() -> None:
    promises.test_engines_agree_on_sampled_tokens()
    model, prompts = model_of("qwen3"), prompts_of()
    for filters in (
        {"top_k": 9},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
    ):
        params = SamplingParams(temperature=0.8, max_new_tokens=20, seed=5, min_new_tokens=3, **filters)
        ours, native = (make_engine(name, model).generate(prompts, 8, params) for name in ("mlx", "native"))
        assert [[c.token_ids for c in g] for g in ours] == [[c.token_ids for c in g] for g in native]


@pytest.mark.usefixtures("beside")
def test_sampled_frequencies_follow_the_model() -> None:
    promises.test_sampled_frequencies_follow_the_model("mlx")


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("engine", list(ENGINES))
def test_turns_are_appended_and_continued_from(engine: str) -> None:
    promises.test_turns_are_appended_and_continued_from(engine)
    promises.test_a_calculator_answers_in_the_same_tokens(engine)
    promises.test_sampled_tokens_with_turns_do_not_depend_on_the_batch(engine)


def test_log_probs_of_a_wide_vocabulary_are_float64s() -> None:
    """MLX's own logsumexp over so many is off by 1e-4 on a CPU; whole chunks may be barred."""
    logits = torch.randn(8, 49152, generator=torch.Generator().manual_seed(0))
    stops = torch.arange(49152) < 1000
    early = torch.tensor([True, False] * 4)
    params = SamplingParams(min_new_tokens=1, seed=0)
    token, found = choose(mx.array(logits.numpy()), draw_uniforms(8, 1, 0)[:, 0], params, early, stops)
    exact = logits.double().log_softmax(-1).gather(1, token[:, None])[:, 0].float()
    torch.testing.assert_close(found, exact, atol=5e-6, rtol=0)
    assert not bool(stops[token[::2]].any())


def test_filters_of_a_wide_vocabulary_pick_what_torch_picks() -> None:
    """Beyond the best 1024 too, where all are sorted, and in chunks of the cumulative sum that do not divide it."""
    generator = torch.Generator().manual_seed(3)
    logits, uniform = torch.randn(64, 5003, generator=generator) * 2, draw_uniforms(64, 1, 4)[:, 0]
    no_stop = torch.zeros(5003, dtype=torch.bool)
    for filters in (
        {},
        {"top_k": 2000},
        {"top_p": 0.999},
        {"top_p": 0.4},
        {"min_p": 0.001},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    ):
        params = SamplingParams(temperature=1.3, **filters)
        expected, log_prob = sample(logits.clone(), uniform, params, ids=5000)
        token, found = choose(mx.array(logits.numpy()), uniform, params, None, no_stop, 5000)
        # Where top-p ends, sums of thousands of numbers round otherwise.
        same = token == expected
        assert same.sum() >= (60 if "top_p" in filters else 64), filters
        found, log_prob = found[same], log_prob[same]
        torch.testing.assert_close(found, log_prob, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", REFUSED)
def test_what_mlx_lm_does_not_compute_as_torch_does_is_refused(family: str) -> None:
    with pytest.raises(EngineError, match=REFUSED[family]) as refused:
        make_engine("mlx", build(family)).generate(prompts_of(), 1, GREEDY)
    assert str(refused.value).endswith("take grpo.engine=native (eval.engine, if that names mlx)")
    assert "\n" not in str(refused.value)
    assert {*SAMPLED, *REFUSED} == FAMILIES.keys()


def test_rows_within_the_window_are_sampled() -> None:
    """Mistral's window of 4096 tokens does no harm to rows of a thousand; mlx-lm leaves it out."""
    engine = MLXEngine(build("mistral", sliding_window=30))
    assert engine.generate([[5] * 6], 1, GREEDY) == MLXEngine(model_of("mistral")).generate(
        [[5] * 6], 1, GREEDY
    )
    with pytest.raises(EngineError, match="from 30 tokens on, and rows may have 31"):
        engine.generate([[5] * 7], 1, GREEDY)


def test_a_prompt_is_computed_once_for_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = MLXEngine(model_of("qwen3")), []
    forward = Mirror.__call__
    monkeypatch.setattr(
        Mirror, "__call__", lambda self, ids, cache: seen.append(ids.shape) or forward(self, ids, cache)
    )
    engine.generate(prompts_of((5, 12, 9)), 16, SamplingParams(max_new_tokens=4, seed=0))
    assert seen == [(3, 11), (3, 1), *[(48, 1)] * 3]


def test_prompts_of_one_token() -> None:
    model, params = model_of("qwen3"), SamplingParams(max_new_tokens=8, seed=0)
    ours, native = (make_engine(name, model).generate([[5], [9]], 2, params) for name in ("mlx", "native"))
    assert [[c.token_ids for c in g] for g in ours] == [[c.token_ids for c in g] for g in native]


def test_only_weights_that_have_changed_are_handed_over() -> None:
    model = build("qwen2_tied")
    mirror = MLXEngine(model).mirror
    size = {name: p.nbytes for name, p in model.named_parameters()}
    assert mirror.refresh(model) == 0
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.data[3, 4] += 1
        model.model.norm.weight.mul_(1.5)
    assert mirror.refresh(model) == size["model.layers.1.mlp.up_proj.weight"] + size["model.norm.weight"]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
    assert mirror.refresh(model) == sum(size.values())  # the tied head once
    assert MLXEngine(model).mirror is mirror


def test_of_an_adapter_only_what_it_changes_is_handed_over() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build("qwen3"), LoraConfig(r=4, target_modules=["q_proj"]))
    mirror = MLXEngine(model).mirror
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    size = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.nbytes
    assert (mirror.refresh(model), mirror.refresh(model)) == (2 * size, 0)
    with model.disable_adapter():
        assert mirror.refresh(model) == 2 * size


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_weights_that_mlx_lm_keeps_otherwise_are_followed(family: str) -> None:
    """Convolutions lie in another order there, norms of Qwen 3.5 count from one."""
    model, prompts = build(family), prompts_of((12, 9))
    engine = MLXEngine(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    for prompt, group in zip(prompts, engine.generate(prompts, 2, GREEDY), strict=True):
        expected = fresh_log_probs(model, prompt, group[0].token_ids)
        assert group[0].token_ids == greedy_of_generate(model, prompt, 24)
        torch.testing.assert_close(torch.tensor(group[0].log_probs), expected, atol=5e-5, rtol=0)
