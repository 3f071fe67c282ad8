"""Masters are float32 and products 16 bit: which weights move at which learning rate, and what a recipe may ask for."""

from __future__ import annotations

import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from algorist.config.schema import GRPOSection
from algorist.config.section import ModelSection
from algorist.errors import ConfigError, EngineError
from algorist.extensions.reference import Reference
from algorist.extensions.vllm.engine import named_weights
from algorist.models.load import load_policy, make_policy
from algorist.models.precision import (
    autocast_of,
    compute_dtype,
    mixed_precision,
    pick_precision,
    round_stochastically,
)
from algorist.rollouts import SamplingParams, make_engine
from algorist.training.batch import Batch
from algorist.training.log_probs import packed_log_probs
from algorist.training.training_arguments import RoundingAdamW, bare_optimizer
from tests.tiny import make_trainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZE, SCALE = 100_000, 0.02
TEXTS = ["Tom has 14 apples."] * 20


def section(**settings: Any) -> ModelSection:
    shape = {"hidden_size": 32, "layers": 2, "vocab_size": 400}
    return ModelSection.model_validate({"name": "tiny", "tiny": shape, **settings})


def update(rate: float, dtype: torch.dtype, rounding: bool = False, steps: int = 100) -> Tensor:
    """Return how far weights of a usual size move under Adam, given the same gradients whatever their type."""
    torch.manual_seed(0)
    start = (torch.randn(SIZE) * SCALE).bfloat16().to(dtype)
    weights = torch.nn.Parameter(start.clone())
    kind = RoundingAdamW if rounding else torch.optim.AdamW
    optimizer = kind([weights], lr=rate, betas=(0.9, 0.999), weight_decay=0.0)
    draw = torch.Generator().manual_seed(1)
    direction = torch.randn(SIZE, generator=draw) * 1e-4
    for _ in range(steps):
        weights.grad = (direction + torch.randn(SIZE, generator=draw) * 3e-4).to(dtype)
        optimizer.step()
    return weights.detach().double() - start.double()


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def default_on_a_gpu() -> dict[str, str]:
    """The types that a recipe gets on a recent GPU when it names none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
        found = pick_precision(section(), CUDA)
    return {"dtype": str(found.master)[6:], "compute_dtype": str(found.compute)[6:]}


def trained(
    folder: Path, types: dict[str, str], rate: float, *, plain: bool = False
) -> tuple[Tensor, Tensor]:
    """Return how far 100 steps of a trainer's own optimizer move a model, and how far Adam in float64 does from the same gradients.

    ``plain`` takes torch's AdamW whatever the weights' type is.
    """
    model = make_policy(section(**types), device=CPU, seed=0, texts=TEXTS).model
    trainer = make_trainer(folder, model, learning_rate=rate)
    if plain:
        trainer.optimizer_cls_and_kwargs = None
    optimizer = trainer.create_optimizer()
    weights = [p for p in model.parameters() if p.requires_grad]
    before = [w.detach().double() for w in weights]
    exact, first, second = ([torch.zeros_like(b) for b in before] for _ in range(3))
    draw = torch.Generator().manual_seed(1)
    direction = [torch.randn(w.shape, generator=draw) * 1e-4 for w in weights]
    for step in range(1, 101):
        for i, weight in enumerate(weights):
            weight.grad = (direction[i] + torch.randn(weight.shape, generator=draw) * 3e-4).to(weight.dtype)
            slope = weight.grad.double()
            first[i] = 0.9 * first[i] + 0.1 * slope
            second[i] = 0.999 * second[i] + 0.001 * slope**2
            exact[i] -= rate * first[i] / (1 - 0.9**step) / ((second[i] / (1 - 0.999**step)).sqrt() + 1e-8)
        optimizer.step()
    moved = [w.detach().double() - b for w, b in zip(weights, before, strict=True)]
    return tuple(torch.cat([t.flatten() for t in found]) for found in (moved, exact))  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-6, 1e-5])
def test_the_default_moves_weights_as_exact_adam_does(rate: float, tmp_path: Path) -> None:
    moved, exact = trained(tmp_path, default_on_a_gpu(), rate)
    assert cosine(moved, exact) >= 0.999
    assert float(moved.norm() / exact.norm()) == pytest.approx(1.0, abs=0.01)
    assert (moved != 0).double().mean() > 0.999


class Copies(TorchDispatchMode):
    """Counts the 16-bit copies of matrices that are alive."""

    alive = most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dim() == 2 and result.dtype == torch.bfloat16:
            self.alive += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(result.untyped_storage(), self._gone)
        return result

    def _gone(self) -> None:
        self.alive -= 1


def test_no_more_copies_of_the_weights_are_held_than_a_layer_reads(tmp_path: Path) -> None:
    """Autocast's cache would hold all of them until a forward ends, which with recomputed layers nobody needs."""
    shape = {"hidden_size": 32, "layers": 6, "vocab_size": 400}
    model = make_policy(section(compute_dtype="bfloat16", tiny=shape), device=CPU, seed=0, texts=TEXTS).model
    trainer = make_trainer(tmp_path, model, gradient_checkpointing=True)
    model.train().gradient_checkpointing_enable()
    batch = Batch([[5, 6, 7]], [[8, 9], [10, 11]], [0, 0], torch.ones(2), torch.ones(2, 2, dtype=torch.bool))
    with Copies() as copies:
        log_probs, _ = packed_log_probs(model, batch, autocast=trainer.accelerator.autocast)
        log_probs.sum().backward()
    assert 7 <= copies.most <= 14  # a layer has 7 matrices, the model 42


@pytest.mark.slow
def test_bare_bfloat16_by_name_keeps_the_update_and_plain_adamw_would_lose_it(tmp_path: Path) -> None:
    bare = {"dtype": "bfloat16", "compute_dtype": "bfloat16"}
    lost, exact = trained(tmp_path, bare, 1e-6, plain=True)
    assert cosine(lost, exact) < 0.3
    kept, exact = trained(tmp_path, bare, 1e-6)
    assert float(kept @ exact / (exact @ exact)) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(("rate", "bare"), [(1e-6, 0.03), (1e-5, 0.20), (2e-5, 0.35), (2e-4, 1.0)])
def test_share_of_weights_that_move_in_bare_bfloat16(rate: float, bare: float) -> None:
    assert (update(rate, torch.float32) != 0).double().mean() > 0.999
    assert (update(rate, torch.bfloat16) != 0).double().mean() < bare + 0.01


@pytest.mark.slow
def test_bare_bfloat16_rounds_at_random_and_keeps_the_size_of_the_update() -> None:
    exact, lost, kept = (
        update(1e-5, torch.float32),
        update(1e-5, torch.bfloat16),
        update(1e-5, torch.bfloat16, rounding=True),
    )
    # Projected on the true update: 1 is all of it.
    assert float(lost @ exact / (exact @ exact)) < 0.3
    assert float(kept @ exact / (exact @ exact)) == pytest.approx(1.0, abs=0.03)


def test_rounding_is_right_on_average_and_repeats() -> None:
    value = torch.full((200_000,), 1.0 + 2**-9)  # a quarter of the way to the next bfloat16 number
    found = round_stochastically(value, 7)
    assert set(found.tolist()) == {1.0, 1.0 + 2**-7}
    assert float(found.double().mean()) == pytest.approx(1.0 + 2**-9, abs=1e-4)
    assert torch.equal(found, round_stochastically(value, 7))
    odd = torch.tensor([float("inf"), float("nan"), -0.0, 3.0])
    assert str(round_stochastically(odd, 1).tolist()) == "[inf, nan, -0.0, 3.0]"


def test_rounding_optimizer_continues_exactly() -> None:
    def run(saved: bool) -> Tensor:
        torch.manual_seed(0)
        weights = torch.nn.Parameter(torch.randn(64).bfloat16())
        optimizer = RoundingAdamW([weights], lr=1e-3)
        for step in range(6):
            if saved and step == 3:
                state, optimizer = optimizer.state_dict(), RoundingAdamW([weights], lr=1e-3)
                optimizer.load_state_dict(state)
            weights.grad = torch.full_like(weights, 0.1 * (step + 1))
            optimizer.step()
        return weights.detach()

    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize(
    ("settings", "capability", "expected"),
    [
        ({}, (9, 0), ("float32", "bfloat16", "bf16")),
        ({}, (7, 5), ("float32", "float16", "fp16")),
        ({"lora": {}}, (9, 0), ("bfloat16", "bfloat16", "bf16")),
        ({"lora": {}}, (7, 5), ("float16", "float16", "fp16")),
        ({"compute_dtype": "float32"}, (9, 0), ("float32", "float32", None)),
        ({"dtype": "bfloat16"}, (9, 0), ("bfloat16", "bfloat16", None)),
        ({"dtype": "float32", "lora": {}}, (9, 0), ("float32", "bfloat16", "bf16")),
    ],
)
def test_types_on_a_gpu(
    settings: dict[str, Any],
    capability: tuple[int, int],
    expected: tuple[str, str, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a T4 torch says that bfloat16 works, but it is emulated."""
    supported = capability >= (8, 0)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or supported
    )
    moved = torch.nn.Module.to

    def stay(module: Any, *given: Any, **named: Any) -> Any:
        return moved(module, *(g for g in given if g != CUDA), **named)

    monkeypatch.setattr(torch.nn.Module, "to", stay)
    model = make_policy(section(**settings), device=CUDA, seed=0, texts=TEXTS).model
    master, compute, flag = expected
    assert str(model.get_input_embeddings().weight.dtype) == f"torch.{master}"
    assert str(compute_dtype(model)) == f"torch.{compute}"
    assert mixed_precision(model, CUDA) == {"bf16": flag == "bf16", "fp16": flag == "fp16"}
    trained = {str(p.dtype) for p in model.parameters() if p.requires_grad}
    assert trained == ({"torch.float32"} if "lora" in settings else {f"torch.{master}"})
    assert (bare_optimizer(model, GRPOSection()) is None) == (trained == {"torch.float32"})


def test_an_adapter_on_a_bfloat16_base_copies_no_input_to_float32() -> None:
    """Half a billion weights took 6.6 GB and 33 s for eight rows on an Intel Xeon with AMX, 4.9 GB and 26 s without the copies."""
    settings = section(dtype="bfloat16", lora={"rank": 2})
    model = make_policy(settings, device=CPU, seed=0, texts=TEXTS).model
    width = model.config.intermediate_size
    kept: list[torch.Tensor] = []
    rows = Batch([[3, 4]], [[5, 6, 7]], [0], torch.zeros(1), torch.ones(1, 3, dtype=torch.bool))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        packed_log_probs(model, rows, autocast=lambda: autocast_of(model, CPU))
    assert {t.dtype for t in kept if t.shape[-1:] == (width,)} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["dtype", "compute_dtype"])
def test_bfloat16_is_refused_where_it_is_emulated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a T4 torch says yes, and the first update ended with "cutlassF: no kernel found to launch!"."""
    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True, s=supported: s)
        if supported:
            assert pick_precision(section(**{name: "bfloat16"}), CUDA).compute == torch.bfloat16
            continue
        with pytest.raises(
            ConfigError, match=r"bfloat16, which this GPU only emulates.*the products are float16"
        ):
            pick_precision(section(**{name: "bfloat16"}), CUDA)


def test_the_reference_holds_products_in_their_type_and_gives_the_policys_numbers() -> None:
    """Float32 masters would be 4 bytes per weight on each GPU, of which autocast reads 2."""
    policy = make_policy(section(compute_dtype="bfloat16"), device=CPU, seed=0, texts=TEXTS).model.eval()
    ids = torch.randint(3, 60, (2, 12))
    with Reference(policy).active(policy) as reference, torch.no_grad():
        assert reference is not None
        autocast = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)
        with autocast():
            assert torch.equal(reference(input_ids=ids).logits, policy(input_ids=ids).logits)
        rows = Batch([[3, 4]], [[5, 6, 7]], [0], torch.zeros(1), torch.ones(1, 3, dtype=torch.bool))
        ours, theirs = (packed_log_probs(m, rows, autocast=autocast)[0] for m in (reference, policy))
        assert torch.equal(ours, theirs)
    layers = [m.weight for m in reference.model.modules() if isinstance(m, torch.nn.Linear)]
    assert {w.dtype for w in layers} == {torch.bfloat16}
    assert reference.get_input_embeddings().weight.dtype == torch.float32


def test_the_reference_holds_every_adapter_that_was_trained_the_embeddings_too() -> None:
    lora = {"rank": 4, "target_modules": ["embed_tokens", "q_proj"]}
    policy = make_policy(section(lora=lora), device=CPU, seed=0, texts=TEXTS).model.eval()
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    assert any("lora_embedding" in name for name in trained)
    for parameter in trained.values():
        torch.nn.init.normal_(parameter, std=0.1)
    reference, ids = Reference(policy), torch.randint(3, 60, (2, 12))
    with torch.no_grad():
        before = policy(input_ids=ids).logits
        for parameter in trained.values():
            parameter.zero_()
        with reference.active(policy):
            assert torch.equal(policy(input_ids=ids).logits, before)
        assert not torch.equal(policy(input_ids=ids).logits, before)
    assert {n for n, p in policy.named_parameters() if p.requires_grad} == set(trained)


def test_a_chat_template_may_be_written_in_the_recipe() -> None:
    """Also one that is too long for a file's name."""
    template = "{# " + "x" * 500 + " #}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = make_policy(section(chat_template=template), device=CPU, seed=0, texts=TEXTS).tokenizer
    assert tokenizer.chat_template == template


def test_a_model_that_is_not_trained_lies_in_the_compute_type(tmp_path: Path) -> None:
    policy = make_policy(section(), device=CPU, seed=0, texts=TEXTS)
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    like = section(compute_dtype="bfloat16")
    for trainable, expected in ((False, torch.bfloat16), (True, torch.float32)):
        model = load_policy(tmp_path, device=CPU, like=like, trainable=trainable).model
        assert model.get_input_embeddings().weight.dtype == expected
        assert compute_dtype(model) == torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "device", "words"),
    [
        ({"dtype": "bfloat16", "compute_dtype": "float32"}, CPU, "model.dtype=float32"),
        ({"compute_dtype": "float16"}, CPU, "or take bfloat16"),
    ],
)
def test_types_that_do_not_go_together(settings: dict[str, Any], device: torch.device, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pick_precision(section(**settings), device)


def test_trained_weights_of_float16_and_other_optimizers_for_bare_bfloat16_are_refused() -> None:
    half = make_policy(section(dtype="float16"), device=CPU, seed=0, texts=TEXTS).model
    with pytest.raises(ConfigError, match="float32 weights, float16 products"):
        mixed_precision(half, CPU)
    bare = make_policy(section(dtype="bfloat16"), device=CPU, seed=0, texts=TEXTS).model
    with pytest.raises(ConfigError, match="adamw_8bit"):
        bare_optimizer(bare, GRPOSection(optim="adamw_8bit"))


VLLM = """
class SamplingParams:
    def __init__(self, **given): pass

class LLM:
    def __init__(self, **given): raise ValueError("no vLLM here")
"""


def test_vllm_computes_in_the_products_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in that of the masters: float32 has no flash attention there, and takes twice the memory."""
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    policy = make_policy(section(compute_dtype="bfloat16"), device=CPU, seed=0, texts=TEXTS)
    assert policy.model.get_input_embeddings().weight.dtype == torch.float32
    engine = make_engine("vllm", policy.model, policy.tokenizer)
    try:
        with pytest.raises(EngineError, match=r"'dtype': 'bfloat16'.*no vLLM here"):
            engine.generate([[5, 6]], 1, SamplingParams(max_new_tokens=2))
    finally:
        sys.modules.pop("vllm", None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_vllm_gets_the_first_updates_of_an_adapter(dtype: str) -> None:
    """Merged and rounded to the nearest, 97 % of an update of this size were lost; on average at random, none is."""
    lora = {"rank": 8, "target_modules": "all-linear"}
    shape = {"hidden_size": 512, "layers": 1, "vocab_size": 400}
    model = make_policy(section(dtype=dtype, lora=lora, tiny=shape), device=CPU, seed=0, texts=TEXTS).model
    before = {n: w.float() for n, w in named_weights(model)}
    draw = torch.Generator().manual_seed(2)
    sizes = {}
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_B") and name.endswith("down_proj"):
            factor = module.lora_B["default"].weight
            factor.data = torch.randn(factor.shape, generator=draw) * 2e-5
            delta = module.get_delta_weight("default").detach()
            sizes[f"{name}.weight"] = delta
    assert sizes
    after = dict(named_weights(model))
    for name, delta in sizes.items():
        assert after[name].dtype == getattr(torch, dtype)
        kept = float(((after[name].float() - before[name]) * delta).sum() / (delta * delta).sum())
        lost = (before[name] + delta).to(after[name].dtype).float() - before[name]
        assert float((lost * delta).sum() / (delta * delta).sum()) < (0.5 if dtype == "bfloat16" else 1.5)
        assert kept == pytest.approx(1.0, abs=0.15)
    untouched = next(n for n in before if n not in sizes)
    assert torch.equal(after[untouched].float(), before[untouched])
    again = dict(named_weights(model))
    assert all(torch.equal(after[n], again[n]) for n in after)  # repeats, as a resumed run must
