"""Triton's kernels of the head equal the numbers of the whole logits; without a GPU in Triton's interpreter: the same source."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
pytest.importorskip("triton", reason="Triton is not installed here (Linux: pip install -e '.[dev]')")

from algorist.training import head_tiles, triton_head  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_tiles_give_the_numbers_of_the_whole_logits(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_tiles, "TILE_ROWS", 3)
    monkeypatch.setattr(head_tiles, "TILE_COLUMNS", 100)
    monkeypatch.setattr(triton_head, "BLOCK", 64)
    if kernels == "triton":
        monkeypatch.setattr(head_tiles, "_kernels", lambda _: (triton_head.fold, triton_head.to_slopes))
    torch.manual_seed(0)
    hidden = torch.randn(7, 8, dtype=torch.float32, device=DEVICE)
    weight, bias = torch.randn(250, 8, device=DEVICE), torch.randn(250, device=DEVICE)
    targets = torch.tensor([0, 99, 100, 150, 249, 0, 0], device=DEVICE)
    targets[5] = (hidden[5] @ weight.t() + bias).argmax()  # the likeliest token
    scales = torch.randn(7, device=DEVICE), torch.randn(7, device=DEVICE)
    results = []
    for whole in (True, False):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        if whole:
            logs = torch.log_softmax((leaves[0] @ leaves[1].t() + leaves[2]) / 0.7, 1)
            log_probs, entropy = logs.gather(1, targets[:, None]).squeeze(1), -(logs.exp() * logs).sum(1)
            is_top1 = logs.argmax(1) == targets
        else:
            log_probs, entropy, is_top1 = head_tiles.TiledHead.apply(*leaves, targets, 1 / 0.7, torch.float32)
        ((log_probs * scales[0]).sum() + (entropy * scales[1]).sum()).backward()
        results.append([log_probs, entropy, is_top1.float(), *(t.grad for t in leaves)])
    for expected, value in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, atol=2e-5, rtol=2e-5)
    assert results[0][2].sum() >= 1
