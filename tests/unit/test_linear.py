"""Linear layers through oneDNN and MKL: values and gradients against float64, and which library is taken."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from algorist.models import products
from algorist.models.products import (
    BY_HAND,
    _Linear,
    fast_linear,
    fixed_linear,
    library,
    mkl_works,
    onednn_works,
    times_transposed,
    weight_gradient,
)


def forget() -> None:
    """Forget what this process has timed and what its runs have chosen."""
    products._fastest.cache_clear()
    products._chosen.clear()


@pytest.fixture(params=["onednn", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both ways, whichever is faster here."""
    monkeypatch.setenv(BY_HAND, request.param)
    forget()
    yield request.param
    forget()


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 48, 96), (200, 96, 48), (1, 8, 8), (33, 40, 7), (500, 5, 300)])
def test_value_and_gradients(shape: tuple[int, int, int], bias: bool) -> None:
    torch.manual_seed(0)
    rows, width, out = shape
    values = [torch.randn(rows, width), torch.randn(out, width)] + ([torch.randn(out)] if bias else [])
    slope = torch.randn(rows, out)
    results = []
    for dtype, context in ((torch.float64, None), (torch.float32, fast_linear)):
        leaves = [v.to(dtype).requires_grad_() for v in values]
        if context is None:
            product = F.linear(*leaves)
        else:
            with context():
                product = F.linear(*leaves)
        results.append([product, *torch.autograd.grad(product, leaves, slope.to(dtype))])
    for exact, found in zip(*results, strict=True):
        assert found.dtype == torch.float32 and found.shape == exact.shape
        assert relative(found, exact) < 2e-6


def test_products_of_views() -> None:
    torch.manual_seed(0)
    slope, inputs = torch.randn(300, 24), torch.randn(300, 60)
    exact = slope.double().t() @ inputs.double()
    assert relative(weight_gradient(slope, inputs), exact) < 2e-6
    assert relative(weight_gradient(inputs, slope), exact.t()) < 2e-6
    assert weight_gradient(inputs, slope).is_contiguous()
    weight = torch.randn(60, 24)
    assert relative(times_transposed(slope, weight), slope.double() @ weight.double().t()) < 2e-6
    assert relative(times_transposed(inputs, weight.t()), inputs.double() @ weight.double()) < 2e-6


@pytest.mark.skipif(not onednn_works(torch.float32), reason="this torch has no oneDNN linear")
def test_only_float32_outside_autocast_is_taken(way: str) -> None:
    if way != "onednn":
        return
    layer, inputs = nn.Linear(32, 32), torch.randn(4, 64, 32)

    def node(product: torch.Tensor) -> str:
        found = product.grad_fn
        while found is not None and "View" in type(found).__name__:
            found = found.next_functions[0][0]
        return type(found).__name__

    mine = f"{_Linear.__name__}Backward"
    with fast_linear():
        assert node(layer(inputs)) == mine
        assert node(layer(inputs[:1, :8])) != mine  # few rows
        assert node(layer.double()(inputs.double())) != mine
        layer.float()
    assert node(layer(inputs)) != mine
    with torch.autocast("cpu", dtype=torch.bfloat16), fast_linear():
        product = layer(inputs)
    assert product.dtype == torch.bfloat16 and node(product) != mine


def test_frozen_weights_get_no_gradient() -> None:
    layer, inputs = nn.Linear(32, 32), torch.randn(64, 32, requires_grad=True)
    layer.requires_grad_(False)
    with fast_linear():
        layer(inputs).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is None
    assert inputs.grad is not None
    assert relative(inputs.grad, layer.weight.double().sum(0).expand(64, 32)) < 2e-6


@pytest.mark.skipif(not onednn_works(torch.float32), reason="this torch has no oneDNN linear")
@pytest.mark.parametrize(("torchs", "expected"), [(2.5, "onednn"), (1.2, "own"), (0.8, "own")])
def test_the_clearly_faster_one_is_taken(
    torchs: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds of a clock of our own: MKL's product takes ``torchs``, oneDNN's takes 1."""
    monkeypatch.delenv(BY_HAND)
    now, state = 0.0, torch.get_rng_state()

    def plain(*given: torch.Tensor) -> torch.Tensor:
        nonlocal now
        now += torchs - 1.0
        return torch.ones(())

    def clock() -> float:
        nonlocal now
        now += 0.5 if clock.calls % 2 == 0 else 1.0
        clock.calls += 1
        return now

    clock.calls = 0
    monkeypatch.setattr(products.F, "linear", plain)
    monkeypatch.setattr(products, "_mkl", lambda *_: (plain, plain))
    monkeypatch.setattr(time, "perf_counter", clock)
    for kind in ("decode", "update"):
        own = "mkl" if kind == "decode" and mkl_works(torch.float32) else "torch"
        forget()
        assert library(kind, torch.float32) == ("onednn" if expected == "onednn" else own)
    assert torch.equal(torch.get_rng_state(), state)  # what is drawn afterwards does not depend on it


def test_bfloat16_weights_are_laid_out_for_decoding(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a timing, whose outcome could differ from one process to the next."""
    monkeypatch.delenv(BY_HAND)
    monkeypatch.setattr(products, "_seconds", lambda *_: pytest.fail("timed"))
    assert library("decode", torch.bfloat16) == ("onednn" if onednn_works(torch.bfloat16) else "torch")


def test_the_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = library("update", torch.float32)
    monkeypatch.setenv(BY_HAND, "torch" if chosen == "onednn" else "onednn")
    assert library("update", torch.float32) == chosen


def test_a_run_continues_with_the_choices_that_it_kept() -> None:
    products.choose(
        {"decode torch.float32": False, "update torch.float32": True}
    )  # of a run before the names
    assert library("decode", torch.float32) == "torch"
    assert library("update", torch.float32) == ("onednn" if onednn_works(torch.float32) else "torch")
    products.choose({"decode torch.float32": "mkl", "decode torch.bfloat16": "mkl"})
    assert library("decode", torch.float32) == ("mkl" if mkl_works(torch.float32) else "torch")
    assert library("decode", torch.bfloat16) == "torch"  # MKL's operator is float32's only


@pytest.mark.parametrize("name", ["torch", "mkl", "onednn"])
@pytest.mark.parametrize("bias", [False, True])
def test_fixed_weights_give_the_same_product_for_any_number_of_rows(name: str, bias: bool) -> None:
    """Laid out for 32 rows, used while the batch shrinks; inputs that are views; weights that are gone."""
    products.choose({"decode torch.float32": name})  # type: ignore[dict-item]
    torch.manual_seed(0)
    weight, added = torch.randn(96, 48), torch.randn(96) if bias else None
    linear, linear_add = fixed_linear(weight.clone(), added, 32)
    for rows in (1, 2, 5, 8, 24, 32, 40, 128):
        for inputs in (torch.randn(rows, 48), torch.randn(rows, 96)[:, 48:], torch.randn(48, rows).t()):
            residual = torch.randn(rows, 96)
            exact = F.linear(inputs.double(), weight.double(), None if added is None else added.double())
            assert relative(linear(inputs), exact) < 2e-6
            assert relative(linear_add(inputs, residual.clone()), exact + residual) < 2e-6
