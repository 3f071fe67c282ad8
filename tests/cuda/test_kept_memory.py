"""What an update keeps for its backward pass on a GPU, counted on shapes (Qwen2.5-1.5B), and what preflight says of it."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf

from algorist.config import load_recipe
from algorist.config.schema import GRPOSection
from algorist.config.section import LoraSection
from algorist.models.load import add_lora
from algorist.models.precision import set_compute
from algorist.preflight.memory_advice import plan_from_config
from algorist.training.batch import Batch
from algorist.training.log_probs import LogProbs, packed_log_probs
from algorist.training.part_size import MIXED_BYTES, saved_bytes, tokens_that_fit
from tests.cuda.pretend import OnDevice, autocast, numbers, pretend_gpu, to_device
from tests.cuda.test_rollout_on_gpu import model as small_model

GB, LAYERS, PROMPT = 1e9, 28, 200
SHAPE: dict[str, Any] = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "vocab_size": 4096,
}  # fmt: skip


def kept(layers: int, rows: int, length: int, checkpointed: bool) -> int:
    with torch.device("meta"):
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(num_hidden_layers=layers, **SHAPE)).bfloat16().train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    completions = [[5] * length] * rows
    mask = torch.ones(rows, length, dtype=torch.bool, device="meta")
    batch = Batch([[7] * PROMPT], completions, [0] * rows, torch.ones(rows, device="meta"), mask)
    return saved_bytes(lambda: packed_log_probs(model, batch)[0].sum(), model)


def held(rows: int, length: int) -> float:
    """Bytes at the peak of 28 checkpointed layers: the inputs of all, everything inside one."""
    one, two = kept(1, rows, length, True), kept(2, rows, length, True)
    inside = kept(2, rows, length, False) - kept(1, rows, length, False)
    return one + (LAYERS - 1) * (two - one) + inside


def test_counting_leaves_nothing_behind() -> None:
    """Each count used to keep all that it had counted, and through it the model, where no collector looks."""
    model, mask = small_model().train(), torch.ones(1, 16, dtype=torch.bool)
    batch = Batch([[1] * 16], [[1] * 16], [0], torch.zeros(1), mask)

    def alive() -> int:
        gc.collect()
        every = {t.untyped_storage()._cdata: t for t in gc.get_objects() if isinstance(t, torch.Tensor)}
        return sum(t.untyped_storage().nbytes() for t in every.values())

    def count() -> int:
        return saved_bytes(lambda: packed_log_probs(model, batch)[0].sum(), model)

    assert count() > 10_000
    before = alive()
    count()
    assert alive() == before


@pytest.mark.parametrize(("rows", "length"), [(16, 1024), (1, 16384)])
def test_bytes_kept_with_checkpointed_layers(rows: int, length: int) -> None:
    """Dense masks and gathered keys would be 68 GB for one row of 16,384 tokens, and checkpointing was not possible."""
    assert held(rows, length) <= 4 * GB


def test_no_part_grows_with_the_square_of_the_length() -> None:
    short, long = kept(1, 1, 4096, False), kept(1, 1, 16384, False)
    assert long < 4.1 * short


def test_float32_masters_cost_what_they_cost() -> None:
    """Weights 4, gradients 4, Adam's moments 8 bytes; the products' copies 2, in the update and again while sampling."""
    recipe = load_recipe("r1-zero-numina", ["grpo.batch_size=8"]).recipe
    config = hf.Qwen2Config(num_hidden_layers=4, **SHAPE)
    with torch.device("meta"):
        size = sum(p.numel() for p in hf.Qwen2ForCausalLM(config).parameters())
    types = {"dtype": torch.float32, "compute": torch.bfloat16}
    mixed = plan_from_config(recipe, "grpo", config, **types)
    assert (mixed.base, mixed.gradients, mixed.optimizer) == (4 * size, 4 * size, 8 * size)
    bare = plan_from_config(recipe, "grpo", config, dtype=torch.bfloat16)
    assert (bare.base, bare.gradients, bare.optimizer) == (2 * size, 2 * size, 8 * size)
    assert mixed.kv_cache - bare.kv_cache == 2 * size
    assert mixed.activations - bare.activations > 2 * size
    recipe.grpo.optim = "adamw_8bit"
    assert plan_from_config(recipe, "grpo", config, **types).optimizer == 2 * size


def kept_on_gpu(
    layers: int, tokens: int, weights: torch.dtype, compute: torch.dtype | None, checkpointed: bool
) -> int:
    """Bytes that autograd keeps with CUDA's autocast lists, weights' copies included; storages counted on the pretend device."""
    shape = {"hidden_size": WIDTH, "intermediate_size": 256, "num_attention_heads": 2, "vocab_size": 64}
    config = hf.Qwen2Config(num_hidden_layers=layers, num_key_value_heads=1, **shape)
    seen: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def storage(tensor: torch.Tensor) -> torch.UntypedStorage:
        return (tensor.inner if isinstance(tensor, OnDevice) else tensor).untyped_storage()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if storage(tensor).data_ptr() not in own:
            seen[storage(tensor).data_ptr()] = storage(tensor).nbytes()
            alive.append(tensor)
        return tensor

    with pretend_gpu():
        model = to_device(hf.Qwen2ForCausalLM(config).to(weights).train())
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        own = {storage(p).data_ptr() for p in model.parameters()}
        row, half = [5] * (tokens // 2), tokens // 2
        mask = OnDevice(torch.ones(1, half, dtype=torch.bool))
        batch = Batch([row], [row], [0], OnDevice(torch.ones(1)), mask)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            packed_log_probs(model, batch, autocast=partial(autocast, compute))
    return sum(seen.values())


WIDTH = 64


def per_token_and_layer(*types: Any) -> float:
    slopes = [(kept_on_gpu(n, 256, *types) - kept_on_gpu(n, 128, *types)) / 128 for n in (1, 2)]
    return slopes[1] - slopes[0]


@pytest.mark.long
@pytest.mark.slow
def test_float32_masters_keep_what_preflight_adds() -> None:
    """A float32 stream: 10 bytes more per token, layer and width than in bfloat16, 4 instead of 2 where layers are computed again."""
    mixed, bare = (torch.float32, torch.bfloat16), (torch.bfloat16, None)
    more = per_token_and_layer(*mixed, False) - per_token_and_layer(*bare, False)
    assert more / WIDTH == pytest.approx(MIXED_BYTES, rel=0.05)
    assert per_token_and_layer(*mixed, True) / WIDTH == pytest.approx(4, rel=0.05)
    assert per_token_and_layer(*bare, True) / WIDTH == pytest.approx(2, rel=0.05)


TYPES: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "float32 masters": (torch.float32, torch.bfloat16),
    "bfloat16": (torch.bfloat16, None),
    "adapter": (torch.bfloat16, torch.bfloat16),
}


def peak(kind: str, layers: int, rows: int, length: int, *, sparing: bool = False) -> int:
    """Bytes at the peak of forward and backward beyond weights and gradients, of every tensor that is alive at one time."""
    dtype, compute = TYPES[kind]
    with torch.device("meta"):
        made: Any = hf.Qwen2ForCausalLM(hf.Qwen2Config(num_hidden_layers=layers, **SHAPE)).to(dtype).train()
        if kind == "adapter":
            made = add_lora(made, LoraSection(rank=16))
    with pretend_gpu(shapes_only=True) as log:
        made = to_device(made)
        made.gradient_checkpointing_enable({"use_reentrant": False})
        made.enable_input_require_grads()
        for parameter in made.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        mask = OnDevice(torch.ones(rows, length, dtype=torch.bool))
        batch = Batch([[7] * PROMPT], [[5] * length] * rows, [0] * rows, OnDevice(torch.ones(rows)), mask)
        gc.collect()  # what making the model left behind must not go during the measurement
        log.reset()
        before = log.held
        log_probs, _ = packed_log_probs(
            made, batch, compute_entropy=True, autocast=partial(autocast, compute), sparing=sparing
        )
        log_probs.sum().backward()
        return log.peak - before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rows", "length", "most"),
    [
        pytest.param("float32 masters", 8, 1024, 4.0, marks=pytest.mark.long),  # 16 rows in two parts
        ("bfloat16", 16, 1024, 4.0),
        pytest.param("bfloat16", 1, 16384, 4.0, marks=pytest.mark.long),
        pytest.param("adapter", 1, 16384, 4.6, marks=pytest.mark.long),  # PEFT's factors take float32 copies
        pytest.param(
            "float32 masters", 1, 16384, 5.6, marks=pytest.mark.long
        ),  # and the stream between layers
    ],
)
def test_the_peak_of_an_update_is_near_preflights(kind: str, rows: int, length: int, most: float) -> None:
    one, two = (peak(kind, layers, rows, length) for layers in (1, 2))
    found = one + (LAYERS - 1) * (two - one)
    assert found <= most * GB
    tokens = PROMPT + rows * length
    changes = [
        f"grpo.batch_size={max(2, rows)}", f"grpo.max_completion_tokens={length}", f"grpo.group_size={max(2, rows)}",
        "grpo.gradient_checkpointing=true", f"grpo.micro_batch_tokens={tokens}",
    ]  # fmt: skip
    recipe = load_recipe("r1-zero-numina", changes + ["model.lora.rank=16"] * (kind == "adapter")).recipe
    config = hf.Qwen2Config(num_hidden_layers=LAYERS, **SHAPE)
    dtype, compute = TYPES[kind]
    plan = plan_from_config(recipe, "grpo", config, dtype=dtype, compute=compute, prompt_tokens=PROMPT)
    assert plan.activations + plan.logits == pytest.approx(found, rel=0.10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("bfloat16", 1.2),
        *(pytest.param(*x, marks=pytest.mark.long) for x in (("adapter", 1.4), ("float32 masters", 1.8))),
    ],
)
def test_one_long_completion_fits_as_the_last_resort(kind: str, most: float) -> None:
    """In tiles one layer takes a gigabyte less, and the inputs of all are not on the device."""
    whole, spared = (
        [peak(kind, layers, 1, 16384, sparing=way) for layers in (1, 2)] for way in (False, True)
    )
    assert spared[0] + (LAYERS - 1) * (spared[1] - spared[0]) <= most * GB
    assert whole[0] - spared[0] >= 1.0 * GB  # in tiles


def test_inputs_of_layers_wait_on_the_host_and_nothing_else_changes(caplog: pytest.LogCaptureFixture) -> None:
    completions, mask = [[5] * 9, [7, 8, 9, 1]], torch.ones(2, 9, dtype=torch.bool)
    mask[1, 4:] = False
    config = hf.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    found = []
    for sparing in (False, True):
        with pretend_gpu() as log:
            torch.manual_seed(0)
            model = to_device(hf.LlamaForCausalLM(config).train())
            model.gradient_checkpointing_enable({"use_reentrant": False})
            passes = LogProbs(verify=False)
            assert not sparing or passes.spare_memory(model, 20)  # worth it without tiles, too
            batch = Batch([[1, 2, 3]], completions, [0, 0], OnDevice(torch.ones(2)), OnDevice(mask))
            log.reset()
            log_probs, _ = passes(model, batch)
            copied = log.syncs["device to host"]
            gradients = torch.autograd.grad((log_probs**2).sum(), list(model.parameters()))
            found.append(
                (numbers(log_probs).detach(), torch.cat([numbers(g).flatten() for g in gradients]), copied)
            )
    (plain, gradient, before), (spared, spared_gradient, after) = found
    assert after == before + 2
    torch.testing.assert_close(spared, plain, atol=1e-5, rtol=1e-5)
    assert float((spared_gradient - gradient).norm() / gradient.norm()) <= 1e-6
    assert (
        "the MLPs in tiles" not in caplog.text
        and "continuing with the layers' inputs in the host's memory" in caplog.text
    )


def test_tokens_of_one_forward_follow_from_the_memory_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "algorist.training.part_size.saved_bytes", lambda forward, model: (forward(), 10**6 * TOKENS.pop())[1]
    )
    section = GRPOSection()

    def fit(section: GRPOSection = section, reserved: int = 0, **changes: Any) -> int:
        TOKENS[:] = [32, 96]
        with pretend_gpu(free=1 << 30, reserved=reserved):
            made = to_device(small_model())
            if changes.get("mixed"):
                set_compute(made, torch.bfloat16)
            found = tokens_that_fit(made, section)
            assert found is not None
            return found

    assert fit() == pytest.approx(0.7 * (1 << 30) / 1e6, rel=0.05)
    assert fit(reserved=1 << 30) == pytest.approx(2 * fit(), rel=0.05)
    assert fit(GRPOSection(gradient_checkpointing=True)) > 1.9 * fit()
    assert fit(GRPOSection(micro_batch_tokens=4000)) == 4000


TOKENS: list[int] = []
