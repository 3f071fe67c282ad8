"""Triton's kernels of whole layers give the twin's rollouts; without a GPU in Triton's interpreter: the same source."""

from __future__ import annotations

import copy
import os
from itertools import chain
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
pytest.importorskip("triton", reason="Triton is not installed here (Linux: pip install -e '.[dev]')")

from algorist.rollouts.base import SamplingParams  # noqa: E402
from algorist.rollouts.native import graph_tier, triton_layer, weights  # noqa: E402
from algorist.rollouts.native.decode_attention import PlainAttention  # noqa: E402
from algorist.rollouts.native.engine import NativeEngine  # noqa: E402
from algorist.rollouts.native.triton_attention import TritonAttention  # noqa: E402
from algorist.rollouts.native.triton_layer import TritonLayer  # noqa: E402
from algorist.rollouts.native.weights import Matrix  # noqa: E402
from tests.unit.rollouts.test_triton_attention import a_state, reference  # noqa: E402

PROMPTS = [[5, 6, 7], [8, 9]]
SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
KINDS: dict[str, tuple[type[Any], dict[str, Any], bool]] = {
    "biases": (hf.Qwen2Config, {"head_dim": 8}, False),
    "norms of the heads": (hf.Qwen3Config, {"head_dim": 24}, False),
    "adapters": (hf.Qwen2Config, {"head_dim": 8}, True),
    "one matrix for gate and up": (hf.Phi3Config, {"pad_token_id": 0}, False),
}


def policy(kind: str) -> Any:
    config, settings, adapted = KINDS[kind]
    torch.manual_seed(0)
    made: Any = hf.AutoModelForCausalLM.from_config(config(**SIZES, **settings))
    with torch.no_grad():
        for parameter in made.parameters():  # biases and norms that are not 0 and 1
            parameter.add_(torch.randn_like(parameter) * 0.2)
    if adapted:
        from peft import LoraConfig, get_peft_model

        made = get_peft_model(made, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return made.to(DEVICE).eval()


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rollouts of a policy on the graph tier, with the kernels of whole layers or without; float32, adapters as factors."""
    ran: list[int] = []
    call = TritonLayer.__call__
    monkeypatch.setattr(TritonLayer, "__call__", lambda self, *of: ran.append(1) or call(self, *of))

    def run(made: Any, kernels: bool, params: SamplingParams) -> Any:
        ran.clear()
        with monkeypatch.context() as patch:
            patch.setattr(
                graph_tier, "attention_kind", lambda _: TritonAttention if kernels else PlainAttention
            )
            patch.setattr(weights, "takes_kernels", lambda *_: kernels)
            patch.setattr(triton_layer, "MOST_SLOTS", triton_layer.FEW_SLOTS)
            real = graph_tier.read_weights
            patch.setattr(graph_tier, "read_weights", lambda *of: real(*of, exact=True))
            found = NativeEngine(made, tier="graph").generate(PROMPTS, 2, params)
        assert bool(ran) == kernels
        return found, len(ran)

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_same_rollouts(kind: str, rollouts: Any) -> None:
    params, made = SamplingParams(max_new_tokens=4, seed=3), policy(kind)
    expected, _ = rollouts(made, False, params)
    found, ran = rollouts(made, True, params)
    assert ran >= 2 * 3, "each of the layers, in each step"
    for ours, theirs in zip(chain(*found), chain(*expected), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)


def test_kernels_that_differ_are_not_taken(
    rollouts: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the first step of each size, whatever a compiler made of them; a kernel that fails is left in the same way."""
    params, made = SamplingParams(max_new_tokens=4, seed=3), policy("biases")
    expected, _ = rollouts(made, False, params)
    product = TritonLayer._product
    for wrong in (lambda self, x, *of: product(self, 1.5 * x, *of), lambda *_: 1 / 0):
        graph_tier._say_once.cache_clear()
        caplog.clear()
        monkeypatch.setattr(TritonLayer, "_product", wrong)
        found, _ = rollouts(made, True, params)
        assert [row.token_ids for row in chain(*found)] == [row.token_ids for row in chain(*expected)]
        said = [r.getMessage() for r in caplog.records if "take their place" in r.getMessage()]
        assert len(said) == 1 and ("differ by" in said[0] or "division by zero" in said[0])


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.float16, 2e-2)], ids=str)
@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("norm", [False, True])
def test_a_layer_in_float64(dtype: torch.dtype, within: float, rank: int, norm: bool) -> None:
    """Sizes that fill no tile; 16-bit products beside a float32 residual, as under autocast."""
    heads, kv, dim, width, inner = 4, 2, 16, 40, 70
    state = a_state([3, 2], [9, 4], [0, 3, 12], kv_heads=kv, dim=dim, dtype=dtype, idle=1)
    torch.manual_seed(1)

    def matrix(outputs: int, inputs: int, bias: bool = False) -> Matrix:
        def numbers(*shape: int) -> Tensor:
            return (torch.randn(*shape, device=DEVICE) * 0.2).to(dtype)

        factors = ((numbers(rank, inputs), numbers(outputs, rank)),) if rank else ()
        return Matrix(numbers(outputs, inputs), numbers(outputs) if bias else None, factors)

    matrices = (
        matrix((heads + 2 * kv) * dim, width, bias=True), matrix(width, heads * dim), matrix(inner, width),
        matrix(inner, width), matrix(width, inner),
    )  # fmt: skip
    if rank:  # gate and up share their first factor
        up = matrices[3]
        shared = Matrix(up.weight, None, ((matrices[2].factors[0][0], up.factors[0][1]),))
        matrices = (*matrices[:3], shared, matrices[4])
    norms = [torch.rand(width, device=DEVICE) + 0.5 for _ in range(2)]
    of_heads = torch.rand(heads + kv, dim, device=DEVICE) + 0.5 if norm else None
    layer: Any = type("Layer", (), {"matrices": matrices, "qk_norm_ND": of_heads})()
    layer.attention_norm, layer.mlp_norm = norms
    slots = len(state.place)
    x = torch.randn(slots, width, device=DEVICE)

    def product(inputs: Tensor, of: Matrix) -> Tensor:
        out = inputs @ of.weight.double().t() + (0 if of.bias is None else of.bias.double())
        return out + sum((inputs @ a.double().t() @ b.double().t() for a, b in of.factors), torch.zeros(()))

    def normed(inputs: Tensor, weight: Tensor) -> Tensor:
        return inputs / (inputs.pow(2).mean(-1, keepdim=True) + state.eps).sqrt() * weight.double()

    qkv, output, gate, up, down = matrices
    before = copy.deepcopy(state)
    attended, _ = reference(
        before, product(normed(x.double(), norms[0]), qkv).view(slots, -1, dim), of_heads, heads
    )
    middle = x.double() + product(attended, output)
    inner_x = normed(middle, norms[1])
    gated = product(inner_x, gate)
    expected = middle + product(gated * gated.sigmoid() * product(inner_x, up), down)
    found = TritonLayer(TritonAttention(state, heads))(0, layer, x)
    live = state.place >= 0
    torch.testing.assert_close(found[live].double(), expected[live], atol=within * 5, rtol=within)
    assert found.isfinite().all()


def test_large_requests_keep_the_librarys_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose products are better where they, and not the number of kernels, bound a token."""
    made: Any = type("W", (), {"layers": [type("L", (), {"matrices": (Matrix(torch.zeros(2, 2), None),)})]})
    assert not TritonLayer.covers(made, 1), "until a card has measured them"
    monkeypatch.setattr(triton_layer, "MOST_SLOTS", triton_layer.FEW_SLOTS)
    assert TritonLayer.covers(made, triton_layer.FEW_SLOTS)
    assert not TritonLayer.covers(made, triton_layer.FEW_SLOTS + 1)
