"""Embedding and head add to the gradients that their weights have: the same sums, and nothing else of the vocabulary's size is made."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from algorist.training import passes
from tests.tiny import make_model, make_trainer


class Large(TorchDispatchMode):
    """Notes the operations that make a dense tensor of a shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.made = shape, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        dense = isinstance(result, torch.Tensor) and not result.is_sparse and result.shape == self.shape
        if dense and not any(isinstance(a, torch.Tensor) and a.data_ptr() == result.data_ptr() for a in args):
            self.made.append(str(func))
        return result


def gradients(
    folder: Path, *, tied: bool, monkeypatch: pytest.MonkeyPatch, plain: bool, **settings: Any
) -> tuple[dict[str, torch.Tensor], list[str]]:
    model = make_model()
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    trainer = make_trainer(folder, model=model, max_steps=1, **settings)
    kept: dict[str, torch.Tensor] = {}
    large = Large(model.get_output_embeddings().weight.shape)
    run = passes.Passes.run

    def noted(self: Any, *given: Any) -> None:
        with large:
            run(self, *given)
        kept.update({name: p.grad.clone() for name, p in model.named_parameters()})

    with monkeypatch.context() as patch:
        patch.setattr(passes.Passes, "run", noted)
        if plain:
            patch.setattr(passes, "gradients_in_place", lambda model, does: nullcontext())
        trainer.train()
    return kept, large.made


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_is_that_of_whole_ones_and_no_other_is_made(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place, few = gradients(tmp_path / "a", tied=tied, monkeypatch=monkeypatch, plain=False)
    whole, many = gradients(tmp_path / "b", tied=tied, monkeypatch=monkeypatch, plain=True)
    assert in_place.keys() == whole.keys()
    for name, expected in whole.items():
        torch.testing.assert_close(in_place[name], expected, atol=1e-7, rtol=1e-5)
        assert not in_place[name].is_sparse and in_place[name].abs().max() > 0
    assert len(few) == 2 - tied, few  # the gradients themselves, made before the first pass
    assert "embedding_dense_backward" in str(many)
