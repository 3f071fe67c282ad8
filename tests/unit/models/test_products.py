"""Linear layers through oneDNN and MKL: values and gradients against float64, and which library is taken."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from algorist import system
from algorist.config.section import ModelSection
from algorist.errors import CheckpointError
from algorist.models import products
from algorist.models.attention import describe
from algorist.models.load import make_policy
from algorist.models.products import (
    BY_HAND,
    WIDE,
    Kind,
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
    """Forget what this process and its runs have chosen."""
    products._usual.cache_clear()
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
@pytest.mark.parametrize(
    ("vendor", "capability", "takes"),
    [
        ("AuthenticAMD", "AVX512", "onednn"),
        ("AuthenticAMD", "AVX2", "decode large"),
        ("GenuineIntel", "AVX512", "own"),
        (None, "DEFAULT", "own"),  # no /proc/cpuinfo
    ],
)
def test_the_processor_decides_and_no_clock(
    vendor: str | None, capability: str, takes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BY_HAND)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(system, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(time, "perf_counter", lambda: pytest.fail("timed"))
    if vendor:
        (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n")
    for kind in get_args(Kind):
        own = "mkl" if kind != "update" and mkl_works(torch.float32) else "torch"
        forget()
        assert library(kind, torch.float32) == ("onednn" if takes in ("onednn", kind) else own)


@pytest.mark.parametrize(("width", "kind"), [(1024, "decode large"), (512, "decode")])
def test_a_large_weight_is_decoded_with_its_own_library(
    width: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    for name in ("mkl", "onednn"):
        monkeypatch.setattr(products, f"_{name}", lambda *_, n=name: (called.append(n), None))
    products.choose({"decode torch.float32": "mkl", "decode large torch.float32": "onednn"})
    products.fixed_linear(torch.zeros(512, width), None, 8)
    assert called == [library(kind, torch.float32)]


@pytest.mark.long
@pytest.mark.slow
def test_ten_fresh_processes_choose_alike(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, so that none has a processor to itself: a timing would differ."""
    if way == "torch":
        pytest.skip("once is enough")
    monkeypatch.delenv(BY_HAND)
    command = [sys.executable, "-c", "from algorist.models.products import choices; print(choices())"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(10)]
    said = {process.communicate()[0] for process in processes}
    assert len(said) == 1 and b"decode" in said.pop()


def test_bfloat16_weights_are_laid_out_for_decoding(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BY_HAND)
    assert library("decode", torch.bfloat16) == ("onednn" if onednn_works(torch.bfloat16) else "torch")


def test_the_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = library("update", torch.float32)
    monkeypatch.setenv(BY_HAND, "torch" if chosen == "onednn" else "onednn")
    assert library("update", torch.float32) == chosen


def test_a_run_continues_with_the_choices_that_it_kept() -> None:
    products.choose({"decode torch.float32": "torch", "update torch.float32": "onednn"})
    assert library("decode", torch.float32) == "torch"
    assert library("update", torch.float32) == ("onednn" if onednn_works(torch.float32) else "torch")
    products.choose({"decode torch.float32": "mkl", "decode torch.bfloat16": "mkl"})
    assert library("decode", torch.float32) == ("mkl" if mkl_works(torch.float32) else "torch")
    assert library("decode", torch.bfloat16) == "torch"  # MKL's operator is float32's only
    with pytest.raises(
        CheckpointError, match=r"products\.json of the run holds .*'evil'.* torch, mkl, onednn"
    ):
        products.choose({"decode torch.float32": "evil"})  # type: ignore[dict-item]


UNITS = {
    "Intel, AMX": ("flags\t: fpu avx512_bf16 amx_bf16", True),
    "AMD Zen 4": ("flags\t: fpu avx512f avx512_bf16", True),
    "Arm": ("Features\t: fp asimd bf16 i8mm", True),
    "none": ("flags\t: fpu avx512f avx512_fp16", False),
}


@pytest.mark.parametrize("processor", UNITS)
def test_wide_models_compute_in_bfloat16_where_the_processor_has_units_for_it(
    processor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training, evaluation and adapters alike; narrow models stay in float32, and the key wins. A run keeps what it began with."""
    flags, has = UNITS[processor]
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(system, "CPUINFO", cpuinfo)
    cpuinfo.write_text(f"{flags}\n")
    forget()

    def made(width: int, *, trained: bool = True, **keys: Any) -> str:
        section = ModelSection(name="tiny", tiny={"hidden_size": width, "layers": 1}, **keys)
        policy = make_policy(section, device=torch.device("cpu"), seed=0, texts=["one two"], trained=trained)
        return describe(policy.model).partition(", attention")[0]

    mixed = "float32 on cpu, products bfloat16" if has else "float32 on cpu"
    bare = "bfloat16 on cpu" if has else "float32 on cpu"
    assert made(WIDE) == mixed and made(WIDE - 64) == "float32 on cpu"
    assert made(WIDE, trained=False) == made(WIDE, lora={"rank": 2}) == bare
    assert made(WIDE, compute_dtype="float32") == "float32 on cpu"
    products.choose(json.loads(json.dumps(products.choices())))
    cpuinfo.write_text("flags\t: fpu\n" if has else "flags\t: amx_bf16\n")
    assert made(WIDE) == mixed


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
