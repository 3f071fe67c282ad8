"""A rollout on a GPU: the CPU's tokens and log-probs, few launches, few waits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from algorist.models.precision import set_compute
from algorist.rollouts.base import Completion, SamplingParams
from algorist.rollouts.native.decoder_tier import DecoderTier
from algorist.rollouts.native.engine import NativeEngine, affordable_tokens
from algorist.rollouts.native.weights import read_weights
from tests.cuda.pretend import pretend_gpu, to_device
from tests.marks import first

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


@pytest.mark.slow
@pytest.mark.parametrize("budget", first(1, [200, None]), ids=["refilled", "one wave"])
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
            NativeEngine(policy, tier="decoder").generate(PROMPTS, 4, params)
            found.append((sum(log.launches.values()), sum(log.syncs.values())))
    return (found[1][0] - found[0][0]) / 20, (found[1][1] - found[0][1]) / 20


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "most"), first(1, [(torch.bfloat16, 44), (torch.float32, 35)], together=True)
)
def test_launches_and_waits_per_token(dtype: torch.dtype, most: int) -> None:
    (one, waits), (two, _) = per_token(1, dtype), per_token(2, dtype)
    assert two - one <= most, f"{two - one} launches per layer and token"
    assert one - (two - one) <= 53
    assert waits == 1


@pytest.mark.long
@pytest.mark.slow
def test_the_budget_counts_what_the_allocator_holds_unused() -> None:
    """After an update nearly all memory is with torch's allocator; a row is tried in any case."""
    policy = model()
    device = torch.device("pretend")
    with pretend_gpu(free=1 << 30):
        little = affordable_tokens(policy, device)
    with pretend_gpu(free=1 << 30, reserved=20 << 30, allocated=5 << 30):
        much = affordable_tokens(policy, device)
        assert affordable_tokens(policy.bfloat16(), device) == 2 * (much or 0)
    assert little is not None and much is not None
    assert much == pytest.approx(16 * little, rel=1e-6)
    with pretend_gpu(free=0):
        params = SamplingParams(max_new_tokens=8, seed=3)
        found = NativeEngine(to_device(model()), tier="decoder").generate(PROMPTS, 4, params)
        assert [len(group) for group in found] == [4, 4, 4]


@pytest.mark.parametrize("on_gpu", [False, True], ids=["CPU", "GPU"])
def test_out_of_memory_promises_the_same_tokens_on_the_cpu_only(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU's products round otherwise in a batch of another size."""
    run = DecoderTier.run

    def run_in_little_memory(tier: Any, prompts: Any, rows: Any, group_size: int, budget: int | None) -> None:
        if budget is None or budget > 60:
            raise torch.OutOfMemoryError("CUDA out of memory")
        run(tier, prompts, rows, group_size, budget)

    with pretend_gpu():
        policy = to_device(model(1)) if on_gpu else model(1)
        engine = NativeEngine(policy, tier="decoder", token_budget=200)
        engine.tier_for(1)  # compares two short rows, once
        monkeypatch.setattr(DecoderTier, "run", run_in_little_memory)
        found = engine.generate(PROMPTS, 4, SamplingParams(max_new_tokens=8, seed=3))
    assert [len(group) for group in found] == [4, 4, 4]
    assert "continuing with at most" in caplog.text
    assert ("same tokens" in caplog.text) == (not on_gpu)


@pytest.mark.long
def test_stop_strings_cost_one_wait_per_token_more() -> None:
    waits = []
    for count in (10, 30):
        with pretend_gpu() as log:
            policy = to_device(model(1, eos_token_id=None))
            engine = NativeEngine(policy, lambda ids: " ".join(map(str, ids)), tier="decoder")
            log.reset()
            params = SamplingParams(max_new_tokens=count, seed=3, stop_strings=("nowhere 1",))
            engine.generate(PROMPTS, 4, params)
            waits.append(sum(n for kind, n in log.syncs.items() if kind != "host to device"))
    assert (waits[1] - waits[0]) / 20 == 2


def gap(policy: Any, prompt: list[int], completions: list[Completion], compute: torch.dtype | None) -> Tensor:
    """|sampler − trainer log-prob| of every token; the trainer is the model's own forward under autocast."""
    found = []
    for completion in completions:
        ids = torch.tensor([prompt + completion.token_ids])
        with torch.no_grad(), torch.autocast("cpu", dtype=compute, enabled=compute is not None):
            logits = policy(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        found.append((chosen - torch.tensor(completion.log_probs)).abs())
    return torch.cat(found)


@pytest.mark.long
@pytest.mark.slow
def test_large_key_biases_do_not_part_sampler_and_trainer() -> None:
    """Qwen2.5 has keys of size 100: with scores in bfloat16 the attention is off by 14 %, and this gap is 0.045."""
    torch.manual_seed(0)
    policy = model(
        4, hidden_size=256, intermediate_size=512, vocab_size=2000, initializer_range=0.05, eos_token_id=None
    )
    with torch.no_grad():
        for layer in policy.model.layers:
            layer.self_attn.k_proj.bias.normal_(0, 20.0)
            layer.self_attn.q_proj.bias.normal_(0, 2.0)
    set_compute(policy, torch.bfloat16)
    prompt = [5, 6, 7, 8, 9, 10] * 10
    with pretend_gpu():
        engine = NativeEngine(to_device(copy.deepcopy(policy)), tier="decoder")
        found = engine.generate([prompt], 4, SamplingParams(max_new_tokens=60, seed=1))[0]
    apart = gap(policy, prompt, found, torch.bfloat16)
    assert apart.mean() < 0.025 and apart.max() < 0.2


def adapted(dtype: torch.dtype, rate: float) -> Any:
    """An adapter after ten small steps."""
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(
        model(eos_token_id=None).to(dtype), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    )
    torch.manual_seed(1)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn_like(parameter).sign() * rate
    return made.eval()


def test_small_changes_of_an_adapter_reach_the_sampler() -> None:
    """Merged into bfloat16 weights, 97 % of such an update would be rounded away."""
    policy = adapted(torch.bfloat16, 5e-5)
    x = torch.randn(256, 64).bfloat16()
    layer = policy.get_base_model().model.layers[0].mlp.up_proj
    delta = layer.get_delta_weight("default").float()
    exact = x.float() @ delta.t()

    def up() -> Tensor:
        return read_weights(policy, 4).layers[0].gate_up(x)[1].float()

    with torch.no_grad():
        found = up()
        with policy.disable_adapter():
            found -= up()
        trained = layer(x).float() - layer.base_layer(x).float()
    # The trainer's own sums are rounded to 16 bit; projected on its change, 1 is all of it.
    assert float((found * trained).sum() / (trained * trained).sum()) == pytest.approx(1.0, abs=0.02)
    merged = (layer.base_layer.weight + delta.bfloat16() - layer.base_layer.weight).float()
    assert (x.float() @ merged.t() - exact).norm() > 0.5 * exact.norm()
    # And the decoder uses them: with the adapter's changes made large, its log-probs are PEFT's.
    strong = adapted(torch.bfloat16, 0.05)
    with pretend_gpu():
        engine = NativeEngine(to_device(copy.deepcopy(strong)), tier="decoder")
        tokens = engine.generate([[5, 6, 7]], 4, SamplingParams(max_new_tokens=20, seed=1))[0]
    assert gap(strong, [5, 6, 7], tokens, None).max() < 0.1
    with strong.disable_adapter():
        assert gap(strong, [5, 6, 7], tokens, None).mean() > 0.05


def test_weights_are_read_where_they_lie() -> None:
    with pretend_gpu() as log:
        policy = to_device(model(2, vocab_size=512).bfloat16())
        size = sum(p.nbytes for p in policy.parameters())
        log.reset()
        read_weights(policy, 16)
        assert log.bytes < 0.25 * size  # queries, keys and values, which are joined in a few steps
