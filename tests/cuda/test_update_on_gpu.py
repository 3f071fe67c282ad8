"""The packed update on a GPU: the CPU's numbers in every combination of weights, autocast, adapter and checkpointing."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from algorist.objectives import LOSSES, Objective, group_centered
from algorist.training import attention_kernels, shared_prefix
from algorist.training.batch import Batch
from algorist.training.extension import Extensions
from algorist.training.log_probs import LogProbs, packed_log_probs
from algorist.training.metrics import Metrics
from algorist.training.objective import LossInputs, loss_of
from algorist.training.packed import pack
from tests.cuda.pretend import OnDevice, autocast, numbers, pretend_gpu, to_device
from tests.cuda.test_rollout_on_gpu import model
from tests.marks import but, first

PROMPT, WIDTH = 6, 20
TYPES = {
    "float32": (torch.float32, None, 1e-5),
    "float32 as bfloat16": (torch.float32, torch.bfloat16, 2e-2),
    "float32 as float16": (torch.float32, torch.float16, 5e-3),
    "bfloat16": (torch.bfloat16, None, 2e-2),
    "float16": (torch.float16, None, 5e-3),
}


def batch() -> Batch:
    torch.manual_seed(1)
    prompts = torch.randint(2, 4096, (2, PROMPT)).tolist()
    sizes = [WIDTH, WIDTH - 5, 7, 1, WIDTH, 3, WIDTH - 9, 12]
    completions = [torch.randint(2, 4096, (size,)).tolist() for size in sizes]
    mask = torch.arange(WIDTH) < torch.tensor(sizes)[:, None]
    return Batch(prompts, completions, [0] * 4 + [1] * 4, torch.ones(8), mask)


def policy(dtype: torch.dtype, lora: bool) -> Any:
    found = model(vocab_size=4096).to(dtype)
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(2)
        targets = ["q_proj", "v_proj", "up_proj"]
        found = get_peft_model(found, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    return found.train()


def gradient(made: Any) -> Tensor:
    return torch.cat([numbers(p.grad).flatten().float() for p in made.parameters() if p.grad is not None])


def run(made: Any, rows: Batch, compute: torch.dtype | None = None) -> Tensor:
    log_probs, entropy = packed_log_probs(
        made, rows, compute_entropy=True, autocast=partial(autocast, compute)
    )
    assert entropy is not None
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    return numbers(log_probs.detach())


@pytest.mark.parametrize("capability", first(1, [(9, 0), (7, 5)]), ids=["H100", "T4"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("kind", but(TYPES, "float32 as bfloat16", "float32 as float16", "float16"))
def test_the_cpus_log_probs_and_gradients(
    kind: str, lora: bool, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, compute, within = TYPES[kind]
    if capability < (8, 0) and torch.bfloat16 in (dtype, compute):
        pytest.skip("refused in words: tests/unit/models/test_precision.py")
    rows = batch()
    exact = policy(torch.float32, lora)
    expected = run(exact, rows)
    with pretend_gpu(capability=capability):
        ours = to_device(policy(dtype, lora))
        with monkeypatch.context() as patch:
            patch.setattr(shared_prefix, "reference_attention", lambda *_: pytest.fail("dense masks"))
            found = run(ours, rows.to("pretend"), compute)
        # Once more with each layer recomputed: the same numbers.
        again = to_device(policy(dtype, lora))
        again.gradient_checkpointing_enable({"use_reentrant": False})
        again.enable_input_require_grads()
        same = run(again, rows.to("pretend"), compute)
    error = (gradient(ours) - gradient(exact)).norm() / gradient(exact).norm()
    assert error < within
    torch.testing.assert_close(found, expected, atol=50 * within, rtol=0)
    torch.testing.assert_close(same, found, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient(again), gradient(ours), atol=1e-5, rtol=1e-2)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["all heads", "grouped heads"])
@pytest.mark.parametrize("kernel", ["varlen", "blocks"])
def test_kernels_agree_with_dense_masks(kernel: str, heads: tuple[int, int]) -> None:
    """Groups of one and of many, completions of one token (nothing to attend with), prompts of unequal length."""
    prompts, prompt_of = [[3, 4, 5], [6], [7, 8, 9, 2, 3], [9, 9]], [0, 0, 1, 2, 2, 3]
    completions = [[1], [1, 2, 3, 4], [5, 6], [7] * 40, [8, 9, 1], [4]]
    rows = Batch(prompts, completions, prompt_of, torch.ones(6), torch.ones(6, 40, dtype=torch.bool))
    dtype = torch.bfloat16 if kernel == "varlen" else torch.float32
    torch.manual_seed(0)
    with pretend_gpu():
        layout = pack(rows.to("pretend"), block_tokens=32)
        size = layout.tokens_N.shape[0]
        inputs = [torch.randn(1, h, size, 16, dtype=dtype) for h in (heads[0], heads[1], heads[1])]
        weights = OnDevice(torch.randn(1, heads[0], size, 16, dtype=dtype))
        results = []
        for name in (kernel, "reference"):
            q, k, v = (OnDevice(t.clone()).requires_grad_() for t in inputs)
            if name == "varlen":
                out = shared_prefix._Varlen.apply(q, k, v, shared_prefix._Row(layout), 0.3)
            elif name == "blocks":
                pair = attention_kernels.efficient_forward, attention_kernels.efficient_backward
                out = shared_prefix._SharedPrefixAttention.apply(
                    q, k, v, shared_prefix._Row(layout), 0.3, *pair
                )
            else:
                out = shared_prefix.reference_attention(q, k, v, layout, 0.3)
            grads = torch.autograd.grad((out * weights).sum(), (q, k, v))
            results.append([numbers(t.detach()).float() for t in (out, *grads)])
    within = 0.06 if kernel == "varlen" else 1e-5
    for expected, found in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, atol=within, rtol=within)


@pytest.mark.parametrize("kind", TYPES)
def test_the_packed_pass_is_taken(kind: str) -> None:
    """It is compared with the model's own pass at its first use, under the same autocast."""
    dtype, compute, _ = TYPES[kind]
    with pretend_gpu():
        made = to_device(policy(dtype, lora=False))
        assert LogProbs().why_plain(made, batch().to("pretend"), partial(autocast, compute)) is None


def test_checkpointed_layers_give_the_cpus_gradients_too() -> None:
    rows = batch()
    plain, checkpointed = (copy.deepcopy(policy(torch.float32, False)) for _ in range(2))
    checkpointed.gradient_checkpointing_enable()
    torch.testing.assert_close(run(checkpointed, rows), run(plain, rows))
    torch.testing.assert_close(gradient(checkpointed), gradient(plain), atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_a_part_waits_for_its_layout_only(kind: str) -> None:
    """However many blocks of rows: one copy of the layout and one of the groups' edges; all metrics of a step are read at once."""
    dtype, compute, _ = TYPES[kind]
    objective, metrics = Objective(LOSSES.get("dapo"), group_centered), Metrics()
    with pretend_gpu() as log:
        made, rows = to_device(policy(dtype, False)), batch().to("pretend")
        weights = rows.mask / 80
        log.reset()
        log_probs, entropy = packed_log_probs(
            made, rows, compute_entropy=True, autocast=partial(autocast, compute)
        )
        loss_of(LossInputs(log_probs, entropy, rows, weights, metrics), objective, Extensions()).backward()
        assert log.syncs["host to device"] <= 2, log.places
        assert sum(log.syncs.values()) <= 2, log.places
        log.reset()
        values = metrics.values()
        assert sum(log.syncs.values()) == 1, log.places
    assert values["entropy"] > 1 and len(values) > 3
