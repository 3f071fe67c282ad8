"""The head on a GPU: tiles instead of small chunks, with the numbers of the full logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from algorist.training.lm_head import completion_log_probs
from tests.cuda.pretend import OnDevice, autocast, numbers, pretend_gpu


@pytest.mark.parametrize(("dtype", "compute"), [(torch.float32, None), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("bias", [False, True])
def test_log_probs_entropies_and_gradients(
    dtype: torch.dtype, compute: torch.dtype | None, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("algorist.training.head_tiles.TILE_COLUMNS", 64)  # several tiles
    torch.manual_seed(0)
    start = [torch.randn(37, 16), torch.randn(150, 16) * 0.3, torch.randn(150) * 0.1]
    targets = torch.randint(0, 150, (37,))
    factors = torch.randn(37), torch.randn(37)

    def score(on_gpu: bool) -> list[Tensor]:
        place = OnDevice if on_gpu else torch.Tensor.clone
        hidden, weight, shift = (place(t.clone()).requires_grad_() for t in start)
        with autocast(compute if on_gpu else None):
            found = completion_log_probs(
                hidden,
                weight,
                shift if bias else None,
                place(targets),
                temperature=0.7,
                compute_entropy=True,
                compute_top1=True,
            )
        assert found.entropy is not None and found.is_top1 is not None
        total = (found.log_probs * place(factors[0])).sum() + (found.entropy * place(factors[1])).sum()
        inputs = (hidden, weight, shift) if bias else (hidden, weight)
        grads = torch.autograd.grad(total, inputs)
        return [numbers(t.detach()).float() for t in (found.log_probs, found.entropy, found.is_top1, *grads)]

    expected = score(on_gpu=False)
    with pretend_gpu():
        found = score(on_gpu=True)
    within = 1e-5 if compute is None else 0.1
    for name, ours, theirs in zip(("log-prob", "entropy", "top 1"), found, expected, strict=False):
        torch.testing.assert_close(ours, theirs, atol=within, rtol=within, msg=name)
    for ours, theirs in zip(found[3:], expected[3:], strict=True):
        assert (ours - theirs).norm() < within * theirs.norm()


@pytest.mark.long
def test_the_matrix_is_read_in_a_few_products() -> None:
    """Chunks of 8 million logits would be 8 products here; tiles are 2."""
    with pretend_gpu() as log:
        hidden, weight = OnDevice(torch.randn(1500, 8)), OnDevice(torch.randn(40_000, 8))
        log.reset()
        completion_log_probs(hidden, weight, None, OnDevice(torch.zeros(1500, dtype=torch.long)))
        assert log.launches["mm"] == 2
