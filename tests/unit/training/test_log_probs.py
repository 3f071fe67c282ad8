"""Log-probs of a batch: head, packed attention, coverage, the plain pass, and how a batch is cut into parts."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from algorist.models.precision import Precision
from algorist.training import attention_kernels
from algorist.training.attention_kernels import cpu_backward, cpu_forward
from algorist.training.batch import Batch
from algorist.training.lm_head import completion_log_probs
from algorist.training.log_probs import LogProbs, packed_log_probs, plain_log_probs, stop_recomputing
from algorist.training.packed import NotPackable, pack
from algorist.training.part_size import kept_per_token
from algorist.training.shared_prefix import (
    _Row,
    _SharedPrefixAttention,
    packed_attention,
    reference_attention,
)
from tests.unit.rollouts.rollout_models import build as build_family

VOCAB = 60
LOCAL = ["sliding_attention", "full_attention"]
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


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 9])
def test_packed_attention_equals_the_reference(window: int | None) -> None:
    torch.manual_seed(0)
    completions = [[7], [7, 8, 9, 1, 2, 3, 4], [2, 3], [1, 2, 3, 4, 5], [9, 9], [3] * 8]
    prompts = [[1, 2, 3, 4, 5, 6], [4], [5, 6]]
    layout = pack(a_batch(prompts, completions, [0, 0, 0, 1, 1, 2]), block_tokens=7)
    size = len(layout.tokens_N)
    query = torch.randn(1, 4, size, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(1, 2, size, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = torch.randn(1, 4, size, 8)
    results = []
    kernel = 0.3, cpu_forward, cpu_backward
    for out in (
        reference_attention(query, key, value, layout, 0.3, window),
        _SharedPrefixAttention.apply(query, key, value, _Row(layout).within(window), *kernel),
    ):
        results.append((out, *torch.autograd.grad((out * weights).sum(), (query, key, value))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-13, rtol=1e-13)


def build(config: PreTrainedConfig, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **kwargs)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def a_batch(prompts: list[list[int]], completions: list[list[int]], prompt_of: list[int]) -> Batch:
    lengths = torch.tensor([len(ids) for ids in completions])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return Batch(prompts, completions, prompt_of, torch.zeros(len(completions)), mask)


def rows() -> Batch:
    ids = torch.randint(1, VOCAB, (6, 14), generator=torch.Generator().manual_seed(1)).tolist()
    completions = [ids[row][:length] for row, length in enumerate((8, 2, 5, 1))]
    return a_batch([ids[4][:6], ids[5][:3]], completions, [0, 0, 1, 1])


def own_log_probs(model: Any, batch: Batch) -> torch.Tensor:
    """Row by row through the model's own forward, nothing padded."""
    result = torch.zeros(batch.mask.shape)
    for row, completion in enumerate(batch.completions):
        tokens = torch.tensor([batch.prompts[batch.prompt_of[row]] + completion])
        logs = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits[0, :-1].float(), -1)
        own = logs.gather(1, tokens[0, 1:, None]).squeeze(1)[-len(completion) :]
        result[row, : len(completion)] = own
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
    "narrow window": MistralConfig(**SHAPE, sliding_window=6),
}
OF_OTHERS = {
    "gemma3": Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=5, layer_types=LOCAL),
    "smollm3": SmolLM3Config(**SHAPE, no_rope_layers=[1, 0], pad_token_id=0),
    "olmo3": Olmo3Config(**SHAPE, sliding_window=5, layer_types=LOCAL),
    "exaone4": Exaone4Config(**SHAPE, sliding_window=5, sliding_window_pattern=2),
    "granite": GraniteConfig(
        **SHAPE,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=1.5,
    ),
    "phi4_mini": Phi3Config(
        **SHAPE,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "ministral": MinistralConfig(**SHAPE, head_dim=8, sliding_window=5, layer_types=LOCAL),
    "ministral3": Ministral3Config(**SHAPE, head_dim=8),
    "lfm2": Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"], conv_L_cache=4, conv_bias=True),
}


@pytest.mark.parametrize("name", COVERED | OF_OTHERS)
def test_packed_and_plain_equal_the_models_own_forward(name: str) -> None:
    model = build((COVERED | OF_OTHERS)[name])
    batch = rows()
    passes = {"packed": LogProbs(), "plain": LogProbs(packed=False)}
    assert passes["packed"].why_plain(model, batch) is None
    expected = own_log_probs(model, batch)
    assert expected.std() > 0.5
    model.train()
    names = [n for n, _ in model.named_parameters()]
    theirs = torch.autograd.grad((expected**2).sum(), list(model.parameters()))
    for kind, log_probs in passes.items():
        found, entropy = log_probs(model, batch, compute_entropy=True)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
        assert (
            entropy is not None and bool((entropy[batch.mask] > 0).all()) and not entropy[~batch.mask].any()
        )
        gradients = torch.autograd.grad((found**2).sum(), list(model.parameters()))
        for parameter, mine, own in zip(names, gradients, theirs, strict=True):
            assert float((mine - own).norm()) <= 2e-5 * float(own.norm()) + 1e-5, (kind, parameter)


def test_bfloat16_products_are_as_exact_packed_as_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build(COVERED["llama"]), rows()
    model.train()
    types: set[torch.dtype] = set()

    def watched(tensors: Any, *given: Any) -> Any:
        types.update(t.dtype for t in tensors[:4])
        return cpu_backward(tensors, *given)

    monkeypatch.setattr(attention_kernels, "cpu_backward", watched)

    def gradient(log_probs: LogProbs, half: bool) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            found, _ = log_probs(model, batch)
        return torch.cat(
            [g.flatten() for g in torch.autograd.grad((found**2).sum(), list(model.parameters()))]
        )

    exact = gradient(LogProbs(), half=False)
    packed, plain = (
        float((gradient(log_probs, half=True) - exact).norm() / exact.norm())
        for log_probs in (LogProbs(), LogProbs(packed=False))
    )
    assert 1e-4 < packed <= 1.2 * plain < 0.2
    assert types == {torch.float32}  # the CPU's kernel is slow backward in bfloat16


def test_an_adapters_product_in_place_is_as_exact_as_pefts() -> None:
    """Under autocast; two adapters, one with dropout that is off, an input that asks for a gradient and one that does not."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, lora_alpha=7, lora_dropout=0.5, target_modules="all-linear", init_lora_weights=False
    )
    made: Any = get_peft_model(build(COVERED["llama"]), config)
    made.add_adapter("second", LoraConfig(r=3, target_modules=["up_proj"], init_lora_weights=False))
    made.base_model.set_adapter(["default", "second"])
    made.eval()
    layers = [module for module in made.modules() if hasattr(module, "lora_A")]
    log_probs, factors = LogProbs(), [p for name, p in made.named_parameters() if "lora_" in name]
    assert len({id(p) for p in factors if p.requires_grad}) == len(factors) == 2 * 7 * 2 + 2 * 2

    def gradient(half: bool) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            found, _ = log_probs(made, rows())
        return torch.cat([g.flatten() for g in torch.autograd.grad((found**2).sum(), factors)])

    def error() -> float:
        return float((gradient(half=True) - exact).norm() / exact.norm())

    exact = gradient(half=False)
    ours = error()
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        in_place, again = layers[0](x), layers[0](x)
    for layer in layers:
        layer.forward = layer.forward.args[1]  # PEFT's own
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(in_place, layers[0](x), atol=0.05, rtol=0.02)
    assert torch.equal(in_place, again)
    assert 1e-4 < ours <= 1.2 * error() < 0.3


@pytest.mark.parametrize("adapted", [False, True], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("name", OF_OTHERS)
def test_the_packed_gradient_is_the_padded_one_in_float64(name: str, adapted: bool) -> None:
    from peft import LoraConfig, get_peft_model

    model = build(OF_OTHERS[name]).double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):  # theirs computes in float32
            module.forward = functools.partial(exact_norm, module, float("Gemma" in type(module).__name__))
    if adapted:
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(model, config).double()
    batch = rows()
    layout = pack(batch)
    with packed_attention(model, layout):
        packed = model.model(
            input_ids=layout.tokens_N[None], position_ids=layout.positions_N[None], use_cache=False
        ).last_hidden_state[0, layout.predict_M]
    alone = []
    for row, completion in enumerate(batch.completions):
        prompt = batch.prompts[batch.prompt_of[row]]
        ids = torch.tensor([prompt + completion])
        alone.append(model.model(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1])
    plain = torch.cat(alone)
    torch.testing.assert_close(packed, plain, atol=1e-12, rtol=1e-12)
    weights = torch.randn(plain.shape, dtype=torch.float64)
    parameters = [p for n, p in model.named_parameters() if p.requires_grad and "lm_head" not in n]
    found, expected = (
        torch.cat([g.flatten() for g in torch.autograd.grad((out * weights).sum(), parameters)])
        for out in (packed, plain)
    )
    assert expected.abs().max() > 0.1
    assert float((found - expected).norm() / expected.norm()) < 1e-12


def exact_norm(module: Any, offset: float, x: torch.Tensor) -> torch.Tensor:
    eps = getattr(module, "eps", None) or module.variance_epsilon
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (module.weight + offset)


def test_float64_stays_float64() -> None:
    model = build(COVERED["llama"]).double()
    batch = a_batch([[1, 2, 3]], [[4, 5, 6, 7]], [0])
    layout = pack(batch)
    with torch.no_grad(), packed_attention(model, layout):
        found = model.model(
            input_ids=layout.tokens_N[None], position_ids=layout.positions_N[None], use_cache=False
        )
    used = layout.used  # nothing is predicted from the last token
    own = model.model(input_ids=torch.arange(1, 1 + used)[None], use_cache=False).last_hidden_state
    torch.testing.assert_close(found.last_hidden_state[:, :used], own, atol=1e-12, rtol=1e-12)


NOT_COVERED = {
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
def test_uncovered_models_take_the_plain_pass_with_one_line(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, word = NOT_COVERED[name]
    model = build(config)
    batch, log_probs = rows(), LogProbs()
    if "attn_pdrop" in str(config):  # dropout is what keeps this one out, and what makes its passes random
        model.train()
        expected = None
    else:
        expected = own_log_probs(model, batch)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found, _ = log_probs(model, batch)
            if expected is not None:
                torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("algorist")]
    assert len(lines) == 1 and word in lines[0] and "the packed log-prob pass is off" in lines[0]
    assert model.config._attn_implementation != "algorist_shared_prefix"


def test_a_model_that_looks_across_rows_is_found_out() -> None:
    """The check at first use refuses a forward that depends on the packing, whatever its configuration says."""
    model = build(COVERED["llama"])

    def shift(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + output.mean(1, keepdim=True)

    model.model.layers[0].mlp.register_forward_hook(shift)
    assert "differs" in str(LogProbs().why_plain(model, rows()))
    assert "differs" in str(LogProbs().why_plain(model, rows(), bfloat16))


def test_the_comparison_makes_the_logits_of_beginnings_only() -> None:
    """Those of eight whole completions of 700 tokens would be gigabytes that no plan has counted."""
    model, sizes = build(LlamaConfig(**SHAPE | {"max_position_embeddings": 1024})), []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[1]))
    batch = a_batch([[5] * 10], [[7] * 700] * 8, [0] * 8)
    assert LogProbs().why_plain(model, batch) is None
    assert max(sizes) == 1 + 128  # from the last token of the prompt on


def bfloat16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_rounding_in_16_bit_is_no_difference(temperature: float) -> None:
    """Single tokens are off by as much as 0.3 in SmolLM2-135M, in either pass: the fast one must not be lost to that."""
    model = build(LlamaConfig(**{**SHAPE, "num_hidden_layers": 6}))
    with torch.no_grad():
        model.lm_head.weight.mul_(22)
    ids = torch.randint(1, VOCAB, (6, 20), generator=torch.Generator().manual_seed(1)).tolist()
    batch = a_batch([ids[4][:6], ids[5][:3]], ids[:4], [0, 0, 1, 1])
    with torch.no_grad():
        packed, _ = packed_log_probs(model, batch, autocast=bfloat16)
        plain, _ = plain_log_probs(model, batch, autocast=bfloat16)
    assert (packed - plain).abs().max() > 0.2
    assert LogProbs(temperature=temperature).why_plain(model, batch, bfloat16) is None
    batch.mask[:] = False  # truncated completions do not count in the loss, but here
    assert LogProbs(temperature=temperature).why_plain(model, batch, bfloat16) is None


def test_mixture_of_experts_is_covered() -> None:
    shape = {**SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model = build(Qwen3MoeConfig(**shape))
    log_probs = LogProbs()
    assert log_probs.why_plain(model, rows()) is None
    torch.testing.assert_close(
        log_probs(model, rows())[0], own_log_probs(model, rows()), atol=5e-4, rtol=1e-3
    )


def test_parts_hold_every_row_once_and_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 9, (24,), generator=generator).tolist()
    batch = a_batch([[1] * 5, [2] * 3, [3] * 7], [[4] * n for n in sizes], [i % 3 for i in range(24)])
    rows = batch.in_group_order(range(24))
    assert sorted(rows) == list(range(24)) and [batch.prompt_of[r] for r in rows] == sorted(
        i % 3 for i in range(24)
    )
    for prompt in range(3):
        lengths = [sizes[r] for r in rows if batch.prompt_of[r] == prompt]
        assert lengths == sorted(lengths)
    for most_rows, most_tokens, small in (
        (24, None, 0),
        (5, None, 0),
        (24, 20, 0),
        (3, 12, 0),
        (24, 1, 0),
        (3, None, 40),
        (3, 30, 40),
    ):
        monkeypatch.setattr("algorist.training.batch.SMALL_PART", small)
        parts = batch.parts(rows, most_rows=most_rows, most_tokens=most_tokens)
        assert [r for part in parts for r in part] == rows
        assert small == 0 or max(map(len, parts)) > most_rows
        for part in parts:
            assert len(part) <= most_rows or batch.packed_tokens(part) <= small
            assert len(part) == 1 or batch.packed_tokens(part) <= (most_tokens or 10**9)


def test_a_part_keeps_its_rows_own_numbers() -> None:
    batch = rows()
    batch.old_log_probs = torch.arange(batch.mask.numel()).view(batch.mask.shape).float()
    part = batch.take([3, 1])
    assert part.completions == [batch.completions[3], batch.completions[1]] and part.prompt_of == [1, 0]
    assert part.width == 2 and part.mask.tolist() == [[True, False], [True, True]]
    assert part.old_log_probs is not None
    assert torch.equal(part.old_log_probs, batch.old_log_probs[[3, 1], :2])
    plain, _ = plain_log_probs(build(COVERED["qwen2"]), part)
    assert plain.shape == (2, 2) and plain[0, 1] == 0


def test_recomputing_is_switched_off_under_either_name() -> None:
    """transformers 5.17, the oldest that is allowed, does not know the name of 5.23."""
    calls: list[str] = []
    for name in ("gradient_checkpointing_disable", "activation_checkpointing_disable"):
        stop_recomputing(SimpleNamespace(**{name: lambda name=name: calls.append(name)}))
    assert calls == ["gradient_checkpointing_disable", "activation_checkpointing_disable"]


def test_memory_is_measured_of_a_model_whose_attention_cannot_be_packed() -> None:
    """GPT-OSS's has sinks, which its first call shows: no run of it began."""
    model = build_family("gpt_oss")
    with pytest.raises(NotPackable, match="attention with s_aux"):
        packed_log_probs(model, rows())
    assert kept_per_token(model, Precision(torch.float32, torch.float32)) > 0
