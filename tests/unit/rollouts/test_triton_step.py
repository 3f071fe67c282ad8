"""Triton's ends of a decode step equal their twins in torch; without a GPU in Triton's interpreter: the same source."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
pytest.importorskip("triton", reason="Triton is not installed here (Linux: pip install -e '.[dev]')")

from algorist.rollouts.base import SamplingParams  # noqa: E402
from algorist.rollouts.native import graph_tier, triton_gated, triton_step  # noqa: E402
from algorist.rollouts.native.decode_attention import PlainAttention  # noqa: E402
from algorist.rollouts.native.engine import NativeEngine  # noqa: E402
from algorist.rollouts.sampling import sample  # noqa: E402
from tests.cuda.test_rollout_on_gpu import model  # noqa: E402
from tests.marks import first  # noqa: E402
from tests.unit.rollouts.test_conformance import Echo, decode  # noqa: E402

PROMPTS = [[5, 6, 7], [8, 9]]


class _AsTriton(PlainAttention):
    """Attention has its own test (``test_triton_attention.py``), and the interpreter takes seconds for it."""

    name = "Triton"


@pytest.mark.slow
@pytest.mark.parametrize("way", first(1, ["calls", "plain", "greedy"]))
def test_same_rollouts(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole graph tier with the kernels after the head, on several chunks of the vocabulary, against torch's operations."""
    params = SamplingParams(max_new_tokens=7, seed=3, temperature={"plain": 0.6, "greedy": 0.0}.get(way, 1.0))
    policy = model(1, vocab_size=300).to(DEVICE)

    def rollouts(kind: type[Any], turns: Echo | None = None) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(graph_tier, "attention_kind", lambda device: kind)
            engine = NativeEngine(policy, decode, tier="graph")
            return engine.generate(PROMPTS, 3, params, *([turns] if turns else []))

    monkeypatch.setattr(triton_step, "CHUNK", 64)
    ran = []
    call = triton_step.TritonTake.__call__
    monkeypatch.setattr(triton_step.TritonTake, "__call__", lambda *given: ran.append(call(*given)))
    echo = None
    if way == "calls":
        echo = Echo(decode([rollouts(PlainAttention)[1][0].token_ids[2]]))
    expected = rollouts(PlainAttention, echo)
    assert not ran
    found = rollouts(_AsTriton, echo)
    assert len(ran) >= 6
    pairs = [pair for both in zip(found, expected, strict=True) for pair in zip(*both, strict=True)]
    for here, there in pairs:
        assert (here.token_ids, here.turns) == (there.token_ids, there.turns)
        assert here.log_probs == pytest.approx(there.log_probs, abs=1e-4, nan_ok=True)
    assert way != "calls" or any(here.turns for here, _ in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", first(1, [0.8, 0.0]))
@pytest.mark.parametrize("ids", first(1, [2 * triton_step.CHUNK + 40, None, triton_step.CHUNK - 30]))
def test_every_number_picks_the_token_that_torch_picks(temperature: float, ids: int | None) -> None:
    """In a vocabulary of several chunks, one of them without any mass; numbers at the edge of two tokens may fall either way.

    Where the tokenizer has fewer ``ids``, within the last chunk or the first, the rest counts in the log-prob only.
    """
    torch.manual_seed(0)
    rows, size = 24, 2 * triton_step.CHUNK + 100
    logits = (4 * torch.randn(rows, size)).bfloat16().to(DEVICE)
    logits[:, triton_step.CHUNK : 2 * triton_step.CHUNK] = float("-inf")
    params = SamplingParams(max_new_tokens=9, temperature=temperature)
    buffers: Any = type("Buffers", (), {"spare": rows, "ids": ids})()
    buffers.uniform = torch.rand(rows + 1, device=DEVICE)
    buffers.uniform[:2] = torch.tensor([0.0, 1.0 - 2.0**-20])
    buffers.token, buffers.reply = (torch.full((rows + 1,), -1, device=DEVICE) for _ in range(2))
    buffers.log_prob, buffers.is_stop = (
        torch.zeros(rows + 1, device=DEVICE),
        torch.zeros(size, dtype=torch.bool, device=DEVICE),
    )
    buffers.is_stop[::2] = True
    state = torch.zeros(len(graph_tier.FIELDS), rows, dtype=torch.int64, device=DEVICE)
    fields = dict(zip(graph_tier.FIELDS, state, strict=True))
    fields["next"].copy_(torch.arange(rows))
    fields["end"].fill_(rows + 5)
    fields["alive"].fill_(1)
    fields["alive"][-1] = 0  # an idle slot writes to the spare place
    token, log_prob = sample(logits.float().clone(), buffers.uniform[:rows].clone(), params, ids=ids)
    triton_step.TritonTake(buffers, params, False)(logits, state)
    same = buffers.token[: rows - 1] == token[:-1]
    assert same.sum() >= rows - 2
    torch.testing.assert_close(buffers.log_prob[: rows - 1][same], log_prob[:-1][same], atol=1e-4, rtol=0)
    assert buffers.token[rows - 1] == -1 and buffers.token[rows] >= 0
    assert fields["next"].tolist() == [*range(1, rows), rows - 1] and fields["length"].tolist() == [1] * (
        rows - 1
    ) + [0]
    assert torch.equal(fields["alive"][:-1] == 0, buffers.is_stop[fields["token"][:-1]])
    logits[3, 7] = float("nan")
    fields["next"].copy_(torch.arange(rows))
    triton_step.TritonTake(buffers, params, False)(logits, state)
    assert buffers.log_prob[3].isnan(), "a broken model is named, not sampled from"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gated_activation(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = (3 * torch.randn(3, 700, device=DEVICE, dtype=dtype) for _ in range(2))
    exact = torch.nn.functional.silu(gate.float()) * up.float()
    torch.testing.assert_close(
        triton_gated.silu_gated(gate, up).float(),
        exact,
        atol=1e-6,
        rtol=1e-2 if dtype != torch.float32 else 1e-5,
    )
    halves = torch.randn(3, 20, device=DEVICE).chunk(2, -1)  # not contiguous
    torch.testing.assert_close(
        triton_gated.silu_gated(*halves), torch.nn.functional.silu(halves[0]) * halves[1]
    )
