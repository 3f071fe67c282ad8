"""The packed update on a GPU: the CPU's numbers in every combination of weights, autocast, adapter and checkpointing."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from algorist.training import shared_prefix
from algorist.training.packed import pack
from algorist.training.update import FastUpdate
from tests.cuda.pretend import OnDevice, autocast, numbers, pretend_gpu, to_device
from tests.cuda.test_rollout_on_gpu import model

ROWS, PROMPT, WIDTH = 8, 6, 20
TYPES = {
    "float32": (torch.float32, None, 1e-5),
    "float32 as bfloat16": (torch.float32, torch.bfloat16, 2e-2),
    "float32 as float16": (torch.float32, torch.float16, 5e-3),
    "bfloat16": (torch.bfloat16, None, 2e-2),
    "float16": (torch.float16, None, 5e-3),
}


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(2, 4096, (ROWS, PROMPT + WIDTH))
    ids[:4, :PROMPT], ids[4:, :PROMPT] = ids[0, :PROMPT], ids[4, :PROMPT]
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    mask[6, -9:] = 0
    return ids, mask


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


def run(made: Any, ids: Tensor, mask: Tensor, compute: torch.dtype | None = None) -> Tensor:
    update = FastUpdate(verify=compute is None)
    log_probs, entropy = update.log_probs(
        made, ids, mask, WIDTH, compute_entropy=True, autocast=partial(autocast, compute)
    ) or pytest.fail("the packed pass was not taken")
    assert entropy is not None
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    return numbers(log_probs.detach())


@pytest.mark.parametrize("capability", [(9, 0), (7, 5)], ids=["H100", "T4"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("kind", TYPES)
def test_the_cpus_log_probs_and_gradients(
    kind: str, lora: bool, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, compute, within = TYPES[kind]
    ids, mask = batch()
    exact = policy(torch.float32, lora)
    expected = run(exact, ids, mask)
    with pretend_gpu(capability=capability):
        ours = to_device(policy(dtype, lora))
        with monkeypatch.context() as patch:
            patch.setattr(shared_prefix, "reference_attention", lambda *_: pytest.fail("dense masks"))
            found = run(ours, ids.to("pretend"), mask.to("pretend"), compute)
        # Once more with each layer recomputed: the same numbers.
        again = to_device(policy(dtype, lora))
        again.gradient_checkpointing_enable({"use_reentrant": False})
        again.enable_input_require_grads()
        same = run(again, ids.to("pretend"), mask.to("pretend"), compute)
    error = (gradient(ours) - gradient(exact)).norm() / gradient(exact).norm()
    assert error < within
    torch.testing.assert_close(found, expected, atol=50 * within, rtol=0)
    torch.testing.assert_close(same, found, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient(again), gradient(ours), atol=1e-5, rtol=1e-2)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["all heads", "grouped heads"])
@pytest.mark.parametrize("kernel", ["varlen", "blocks"])
def test_kernels_agree_with_dense_masks(kernel: str, heads: tuple[int, int]) -> None:
    """Groups of one and of many, completions of one token (nothing to attend with), prompts of unequal length."""
    prompts = [[3, 4, 5], [3, 4, 5], [6], [7, 8, 9, 2, 3], [7, 8, 9, 2, 3], [9, 9]]
    completions = [[1], [1, 2, 3, 4], [5, 6], [7] * 40, [8, 9, 1], [4]]
    device = torch.device("pretend", 0)
    dtype = torch.bfloat16 if kernel == "varlen" else torch.float32
    torch.manual_seed(0)
    with pretend_gpu():
        layout = pack(prompts, completions, list(range(6)), 40, device, block_tokens=32)
        size = layout.tokens_N.shape[0]
        inputs = [torch.randn(1, h, size, 16, dtype=dtype) for h in (heads[0], heads[1], heads[1])]
        weights = OnDevice(torch.randn(1, heads[0], size, 16, dtype=dtype))
        results = []
        for name in (kernel, "reference"):
            q, k, v = (OnDevice(t.clone()).requires_grad_() for t in inputs)
            if name == "varlen":
                out = shared_prefix._Varlen.apply(q, k, v, shared_prefix._Row(layout), 0.3)
            elif name == "blocks":
                pair = shared_prefix._efficient_forward, shared_prefix._efficient_backward
                out = shared_prefix._SharedPrefixAttention.apply(q, k, v, layout, 0.3, *pair)
            else:
                out = shared_prefix.reference_attention(q, k, v, layout, 0.3)
            grads = torch.autograd.grad((out * weights).sum(), (q, k, v))
            results.append([numbers(t.detach()).float() for t in (out, *grads)])
    within = 0.06 if kernel == "varlen" else 1e-5
    for expected, found in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, atol=within, rtol=within)


def test_checkpointed_layers_give_the_cpus_gradients_too() -> None:
    ids, mask = batch()
    plain, checkpointed = (copy.deepcopy(policy(torch.float32, False)) for _ in range(2))
    checkpointed.gradient_checkpointing_enable()
    torch.testing.assert_close(run(checkpointed, ids, mask), run(plain, ids, mask))
    torch.testing.assert_close(gradient(checkpointed), gradient(plain), atol=1e-6, rtol=1e-3)
