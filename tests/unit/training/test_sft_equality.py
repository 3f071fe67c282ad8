"""SFT's fast loss against stock TRL's: the same loss, gradient and logged numbers on the same batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM
from trl import SFTConfig, SFTTrainer

from algorist.models.attention import float32_attention
from algorist.models.precision import set_compute
from algorist.training.sft import AlgoristSFTTrainer
from tests.tiny import TOKENIZER, make_model

VOCAB = len(TOKENIZER)


def soft_capped() -> Any:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, final_logit_softcapping=5.0, pad_token_id=TOKENIZER.pad_token_id,
        )
    )  # fmt: skip


def rows() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for prompt, completion in ((3, 5), (9, 1), (4, 12), (7, 30), (1, 8), (20, 2)):
        ids = torch.randint(3, VOCAB, (prompt + completion,), generator=generator).tolist()
        found.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return found


def make(cls: type[Any], folder: Path, model: Any, **changes: Any) -> Any:
    return cls(
        model=model,
        args=SFTConfig(
            output_dir=str(folder), per_device_train_batch_size=6, use_cpu=True, bf16=False, report_to=[],
            dataset_kwargs={"skip_prepare_dataset": True}, completion_only_loss=False, **changes,
        ),
        train_dataset=Dataset.from_list(rows()),
        processing_class=TOKENIZER,
    )  # fmt: skip


def measured(
    trainer: Any, inputs: dict[str, Any], items: Any
) -> tuple[float, torch.Tensor, dict[str, float]]:
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=items)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss.item(), gradient, logged


@pytest.mark.parametrize("kind", ["full", "untied", "lora", "soft-capped"])
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_loss_gradient_and_metrics_equal_stock_trl(tmp_path: Path, kind: str, loss_type: str) -> None:
    found = []
    for cls in (SFTTrainer, AlgoristSFTTrainer):
        model = soft_capped() if kind == "soft-capped" else make_model()
        if kind == "untied":
            model.config.tie_word_embeddings = False
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
        if kind == "lora":
            from peft import get_peft_model

            torch.manual_seed(1)
            lora = LoraConfig(
                r=8, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
            )
            model = get_peft_model(model, lora)
        trainer = make(cls, tmp_path, model, loss_type=loss_type)
        inputs = next(iter(trainer.get_train_dataloader()))
        found.append(measured(trainer, inputs, torch.tensor(40)))
    (loss, gradient, logged), (our_loss, our_gradient, our_logged) = found
    assert our_loss == pytest.approx(loss, rel=1e-5) and loss > 0.01
    assert float((our_gradient - gradient).norm() / gradient.norm()) <= 1e-5
    assert our_logged == pytest.approx(logged, rel=1e-4)
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= set(our_logged)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_gives_stock_trls_weights(tmp_path: Path, checkpointing: bool) -> None:
    weights = []
    for cls in (SFTTrainer, AlgoristSFTTrainer):
        model = make_model()
        changes = {"max_steps": 3, "learning_rate": 0.05, "optim": "sgd", "save_strategy": "no"}
        make(cls, tmp_path, model, gradient_checkpointing=checkpointing, **changes).train()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    assert float((weights[1] - weights[0]).norm() / (weights[0] - start).norm()) <= 1e-5


def test_a_batch_without_labels_is_left_to_trl(tmp_path: Path) -> None:
    trainer = make(AlgoristSFTTrainer, tmp_path, make_model())
    inputs = next(iter(trainer.get_train_dataloader()))
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    loss, gradient, _ = measured(trainer, inputs, torch.tensor(0))
    assert loss == 0.0 and not gradient.any()


def test_the_head_sees_only_positions_with_a_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from algorist.training import sft as sft_head

    seen: list[int] = []
    real = sft_head.completion_log_probs

    def watched(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(hidden.shape[0])
        return real(hidden, *args, **kwargs)

    monkeypatch.setattr(sft_head, "completion_log_probs", watched)
    trainer = make(AlgoristSFTTrainer, tmp_path, make_model())
    inputs = next(iter(trainer.get_train_dataloader()))
    measured(trainer, inputs, torch.tensor(40))
    assert seen == [int((inputs["labels"][:, 1:] != -100).sum())]


class AttentionTypes(TorchDispatchMode):
    """Notes in which types attention's kernels run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in func.name():
            self.seen.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bfloat16_products_are_as_exact_as_stock_trls(tmp_path: Path, checkpointing: bool) -> None:
    attention = AttentionTypes()

    def gradient(cls: type[Any], half: bool) -> torch.Tensor:
        model = make_model()
        if half:
            set_compute(model, torch.bfloat16)
        trainer = make(cls, tmp_path, model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        inputs = next(iter(trainer.get_train_dataloader()))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half), attention:
            attention.seen.clear()
            return measured(trainer, inputs, torch.tensor(40))[1]

    exact = gradient(SFTTrainer, half=False)
    stock, ours = (
        float((gradient(cls, half=True) - exact).norm() / exact.norm())
        for cls in (SFTTrainer, AlgoristSFTTrainer)
    )
    assert 1e-4 < ours <= 1.5 * stock < 0.1  # differences of single roundings
    assert attention.seen == {torch.bfloat16 if checkpointing else torch.float32}


def test_attention_of_bfloat16_products_runs_in_float32_on_the_cpu() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 9, 8).bfloat16() for _ in range(3))
    mask = torch.randn(2, 1, 9, 9).bfloat16()
    exact = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), attn_mask=mask.float())
    plain = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    model = make_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with float32_attention(model):  # a model of float32 products: nothing changes
            assert torch.equal(F.scaled_dot_product_attention(query, key, value, attn_mask=mask), plain)
        set_compute(model, torch.bfloat16)
        with float32_attention(model):
            found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert torch.equal(found, exact.bfloat16()) and not torch.equal(found, plain)
