"""MLPs in tiles: the same gradient, a tile at a time, and only when one completion does not fit by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from algorist.errors import TrainingError
from algorist.training import packed as long_rows
from algorist.training.batch import Batch
from algorist.training.log_probs import LogProbs, packed_log_probs
from tests.tiny import make_model, make_trainer, parameters_of

SHAPE: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
TILE = 4


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_rows, "TILE_TOKENS", TILE)


def recomputing(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def sizes_seen(model: Any, *, limit: int | None = None) -> list[int]:
    """Return the list that will have the tokens of every product into an MLP's inner width; more than ``limit`` run out of memory."""
    seen: list[int] = []

    def watch(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.append(inputs[0].shape[-2])
        if limit is not None and seen[-1] > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_pre_hook(watch)
    return seen


@pytest.mark.parametrize(
    "config", [LlamaConfig(**SHAPE), Qwen3Config(**SHAPE, head_dim=8)], ids=["llama", "qwen3"]
)
def test_log_probs_and_gradients_are_the_same(config: Any) -> None:
    torch.manual_seed(0)
    model = recomputing(AutoModelForCausalLM.from_config(config))
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1, 4:] = False
    completions = [[5] * 9, [7, 8, 9, 1], list(range(9))]
    batch = Batch([[1, 2, 3], [4, 5]], completions, [0, 0, 1], torch.ones(3), mask)
    found, seen = [], sizes_seen(model)
    for sparing in (False, True):
        del seen[:]
        log_probs, _ = packed_log_probs(model, batch, sparing=sparing)
        gradients = torch.autograd.grad((log_probs**2).sum(), list(model.parameters()))
        found.append((log_probs, torch.cat([g.flatten() for g in gradients])))
        assert max(seen) == (TILE if sparing else 32) and "forward" not in vars(model.model.layers[0].mlp)
    (whole, gradient), (in_tiles, tiled_gradient) = found
    torch.testing.assert_close(in_tiles, whole, atol=1e-5, rtol=1e-5)
    assert float((tiled_gradient - gradient).norm() / gradient.norm()) <= 1e-6


def test_tiles_are_taken_once_and_only_where_they_save_memory() -> None:
    passes = LogProbs()
    keeping = make_model().train()  # nothing is computed again: a tile's tensors would be kept
    assert not passes.spare_memory(keeping, 100)
    assert not passes.spare_memory(recomputing(make_model()), 2 * TILE - 1)
    experts = Qwen3MoeConfig(**SHAPE, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
    assert not passes.spare_memory(recomputing(AutoModelForCausalLM.from_config(experts)), 100)
    assert not LogProbs(packed=False).spare_memory(recomputing(make_model()), 100)
    assert passes.spare_memory(recomputing(make_model()), 100) and passes.sparing
    assert not passes.spare_memory(recomputing(make_model()), 100)  # tried already


def trained(folder: Path, *, limit: int | None) -> torch.Tensor:
    """Return the weights after two steps of a trainer whose MLPs run out of memory above ``limit`` tokens at a time."""
    model = make_model()
    trainer = make_trainer(folder, model, max_steps=2, gradient_checkpointing=True)
    trainer.log_probs.verify = False
    trainer.engine.model = make_model().eval()  # sampling is not what runs out of memory here
    sizes_seen(model, limit=limit)
    trainer.train()
    return parameters_of(trainer)


@pytest.mark.slow
def test_a_completion_that_does_not_fit_by_itself_is_trained_in_tiles(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    whole = trained(tmp_path / "whole", limit=None)
    assert "in tiles" not in caplog.text
    tiled = trained(tmp_path / "tiles", limit=2 * TILE - 1)
    assert caplog.text.count("in tiles") == 1
    assert (
        float((tiled - whole).norm() / (whole - start).norm()) <= 1e-3
    )  # AdamW divides small differences by small ones


def test_the_run_ends_when_a_tile_does_not_fit_either(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="also with one row at a time"):
        trained(tmp_path, limit=TILE - 1)
