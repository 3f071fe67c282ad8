"""Liger's kernels in a model: the source that GPUs run, in Triton's interpreter over the CPU's memory, called a GPU."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from transformers.models.qwen3 import modeling_qwen3

from algorist.config.section import LoraSection, ModelSection
from algorist.extensions.liger import fuse
from algorist.models import precision, products
from algorist.models.attention import describe
from algorist.models.load import add_lora, load_policy, make_policy, settle
from algorist.models.loaders import LOADERS
from algorist.models.sharding import is_sharded
from algorist.models.tiny import tiny_model
from algorist.rollouts.native.weights import why_no_decoder
from algorist.training.batch import Batch
from algorist.training.distributed import shard
from algorist.training.log_probs import LogProbs, packed_log_probs
from tests.tiny import QUESTIONS, TOKENIZER

CPU, TINY = torch.device("cpu"), {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1}
ROTATION = "apply_rotary_pos_emb"
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter knows neither numbers that are no tensors (``eps.to(…)``) nor CUDA's own rsqrt."""
    norms = pytest.importorskip(
        "liger_kernel.ops.rms_norm",
        reason="liger-kernel is not installed here (Linux: pip install -e '.[dev]')",
    )
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    own = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if not isinstance(value, float):
            return own(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(norms, "rsqrt", lambda x: tl.math.rsqrt(x))
    monkeypatch.setattr(precision, "GPUS", {"cpu"})
    monkeypatch.setattr(products, "why_no_triton", lambda: None)
    # It changes for a whole family, and comes back at the end.
    monkeypatch.setattr(modeling_qwen3, ROTATION, getattr(modeling_qwen3, ROTATION))


def batch() -> Batch:
    torch.manual_seed(1)
    sizes = [9, 4, 1, 7]
    completions = [torch.randint(3, 100, (size,)).tolist() for size in sizes]
    mask = torch.arange(9) < torch.tensor(sizes)[:, None]
    return Batch([[5, 6, 7], [8, 9]], completions, [0, 0, 1, 1], torch.ones(4), mask)


def update(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return log-probs, and gradients by name."""
    found, entropy = packed_log_probs(model, batch(), compute_entropy=True)
    assert entropy is not None
    (found.sum() + entropy.sum()).backward()
    return found.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def fused_modules(model: Any) -> int:
    return sum(
        getattr(vars(m).get("forward"), "__module__", "") == "algorist.extensions.liger"
        for m in model.modules()
    )


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
@pytest.mark.long
def test_log_probs_and_gradients_are_the_models_own(adapter: bool, checkpointed: bool) -> None:
    found = []
    for fused in (False, True):
        model: Any = tiny_model(TOKENIZER, seed=1, **TINY)
        if fused:
            fuse(model)
            assert fused_modules(model) == 13, (
                "of two layers two norms, two of heads, MLP and attention; the last norm"
            )
            assert modeling_qwen3.apply_rotary_pos_emb.__module__ == "algorist.extensions.liger"
        if adapter:
            torch.manual_seed(2)
            model = add_lora(model, LoraSection(rank=2, alpha=2, target_modules="all-linear"))
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(weight, std=0.05)
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        assert LogProbs().why_plain(model, batch()) is None
        found.append(update(model))
    (expected, slopes), (log_probs, ours) = found
    assert slopes.keys() == ours.keys() and not torch.equal(log_probs, torch.zeros_like(log_probs))
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)
    for name, slope in slopes.items():
        assert (ours[name] - slope).norm() <= 1e-5 * slope.norm() + 1e-7, name


@pytest.mark.long
def test_a_recipes_model_runs_them_and_says_so(tmp_path: Any) -> None:
    """From scratch and from a folder; samplers read its weights as before; on another device it computes by itself."""
    section = ModelSection(name="tiny", tiny=TINY)
    made = make_policy(section, device=CPU, seed=0, texts=QUESTIONS)
    assert fused_modules(made.model) == 13 and describe(made.model).endswith(
        "attention sdpa, Liger's kernels"
    )
    assert why_no_decoder(made.model) is None
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    assert fused_modules(load_policy(tmp_path, device=CPU).model) == 13
    off = load_policy(tmp_path, device=CPU, trainable=True, like=ModelSection(liger_kernel=False)).model
    assert fused_modules(off) == 0 and "Liger" not in describe(off)

    ids, elsewhere = torch.tensor([[5, 6, 7]]), copy.deepcopy(made.model)
    expected = made.model(ids).logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "GPUS", {"cuda"})
        patch.setattr("liger_kernel.ops.rms_norm.LigerRMSNormFunction.apply", None)
        torch.testing.assert_close(elsewhere(ids).logits, expected, atol=1e-5, rtol=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("liger_kernel.ops.LigerRopeFunction.apply", None)
        torch.testing.assert_close(off(ids).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.long
def test_kernels_that_compute_something_else_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, loader = tiny_model(TOKENIZER, seed=1, **TINY), LOADERS.get("liger")
    expected = model(torch.tensor([[5, 6, 7]])).logits
    import triton.language as tl

    for wrong, why in (
        (lambda x: 1.1 * tl.math.rsqrt(x), "logits and slopes differ by "),
        (lambda x: tl.math.rsqrt(-x), "differ by nan and nan"),
        (lambda x: x.no_such_thing, "no_such_thing"),
    ):
        caplog.clear()
        monkeypatch.setattr("liger_kernel.ops.rms_norm.rsqrt", wrong)
        with caplog.at_level(logging.WARNING):
            loader.loaded(model, ModelSection())
        assert "Qwen3ForCausalLM runs without Liger's kernels: " in caplog.text and why in caplog.text
        assert torch.equal(model(torch.tensor([[5, 6, 7]])).logits, expected)


_LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true",
    "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}  # fmt: skip


@pytest.mark.long
def test_a_sharded_model_takes_them_after_its_own_comparison(tmp_path: Path) -> None:
    """In a process of its own, where no test has made another device."""
    code = f"from tests.unit.extensions.test_liger import compare_sharded; compare_sharded({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | _LAUNCHED, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def compare_sharded(folder: str) -> None:
    """Shard a model by one process, let it take the kernels, and compare it with one that does not."""
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        PartialState(cpu=True)
        model = tiny_model(TOKENIZER, seed=1, **TINY)
        whole, ids = copy.deepcopy(model), torch.tensor([[5, 6, 7]])
        shard(model, CPU)
        assert is_sharded(model)
        settle(model, ModelSection(), CPU)
        assert fused_modules(model) == 13 and describe(model).endswith("Liger's kernels")
        logits = [each(ids).logits for each in (model, whole)]
        torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=0)
        for each in logits:
            each.logsumexp(-1).sum().backward()
        for (name, ours), own in zip(model.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), own.grad, atol=1e-5, rtol=1e-4, msg=name)
