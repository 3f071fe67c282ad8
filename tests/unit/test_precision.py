"""Masters are float32 and products 16 bit: which weights move at which learning rate, and what a recipe may ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from algorist.config.schema import GRPOSection, ModelSection
from algorist.errors import ConfigError
from algorist.models.load import load_policy, make_policy
from algorist.models.precision import compute_dtype, mixed_precision, pick_precision
from algorist.training.rounding import RoundingAdamW, bare_optimizer, round_stochastically

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


def default_master() -> torch.dtype:
    """The type of trained weights that a recipe gets on a recent GPU when it names none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
        return pick_precision(section(), CUDA).master


@pytest.mark.parametrize(("rate", "bare"), [(1e-6, 0.03), (1e-5, 0.20), (2e-5, 0.35), (2e-4, 1.0)])
def test_share_of_weights_that_move(rate: float, bare: float) -> None:
    exact = update(rate, torch.float32)
    default = update(rate, default_master())
    assert (default != 0).double().mean() > 0.999
    assert cosine(default, exact) >= 0.999
    # What the default avoids: bare bfloat16, rounded to the nearest.
    assert (update(rate, torch.bfloat16) != 0).double().mean() < bare + 0.01


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
