"""SFT against stock TRL: the same loss, gradient and logged numbers on the same batch, the same weights after twenty steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM
from trl import SFTConfig, SFTTrainer

from algorist.config.schema import SFTSection
from algorist.models.float32_attention import float32_attention
from algorist.models.precision import set_compute
from algorist.training.sft import AlgoristSFTTrainer, batch_of
from algorist.training.step import update
from tests.tiny import CPU, TOKENIZER, make_model

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


def stock(folder: Path, model: Any, **changes: Any) -> Any:
    """Return TRL's trainer, its rows of six in a step."""
    settings = {"per_device_train_batch_size": 6, "gradient_checkpointing": False} | changes
    return SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], seed=7, data_seed=7, logging_steps=1,
            dataset_kwargs={"skip_prepare_dataset": True}, completion_only_loss=False, save_strategy="no", **settings,
        ),
        train_dataset=Dataset.from_list(rows()),
        processing_class=TOKENIZER,
    )  # fmt: skip


def ours(folder: Path, model: Any, **changes: Any) -> AlgoristSFTTrainer:
    settings = {"batch_size": 6, "save_steps": 10**9} | changes
    return AlgoristSFTTrainer(
        rows=rows(),
        model=model,
        tokenizer=TOKENIZER,
        section=SFTSection(**settings),
        output_dir=folder,
        seed=7,
        device=CPU,
    )


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def stock_step(trainer: Any) -> tuple[float, torch.Tensor, dict[str, float]]:
    trainer.model.train()
    inputs = next(iter(trainer.get_train_dataloader()))
    labels = (inputs["labels"][:, 1:] != -100).sum()
    loss = trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=labels)
    loss.backward()
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss.item(), gradient_of(trainer.model), logged


def our_step(trainer: AlgoristSFTTrainer) -> tuple[float, torch.Tensor, dict[str, float]]:
    loss = trainer.training_step(trainer.model, next(iter(trainer.get_train_dataloader())))
    logged = trainer.averages.take() | {"num_tokens": float(trainer.state.num_input_tokens_seen)}
    return loss.item(), gradient_of(trainer.model), logged


def made(kind: str) -> Any:
    model = soft_capped() if kind == "soft-capped" else make_model()
    if kind == "untied":
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
    if kind == "lora":
        torch.manual_seed(1)
        lora = LoraConfig(
            r=8, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        return get_peft_model(model, lora)
    return model


@pytest.mark.parametrize("kind", ["full", "untied", "lora", "soft-capped"])
@pytest.mark.parametrize("part_tokens", [None, 40])
def test_loss_gradient_and_metrics_equal_stock_trl(
    tmp_path: Path, kind: str, part_tokens: int | None
) -> None:
    loss, gradient, logged = stock_step(stock(tmp_path, made(kind)))
    result = our_step(ours(tmp_path, made(kind), micro_batch_tokens=part_tokens))
    assert result[0] == pytest.approx(loss, rel=1e-5) and loss > 0.01
    assert float((result[1] - gradient).norm() / gradient.norm()) <= 1e-5
    assert result[2] == pytest.approx(logged, rel=1e-4)
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= set(result[2])


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_twenty_steps_give_stock_trls_weights(tmp_path: Path, checkpointing: bool) -> None:
    """Six rows in micro-batches of two, two to a step: the second step of an epoch has one, and ten epochs draw ten orders."""
    weights, logs = [], []
    common = {"max_steps": 20, "learning_rate": 0.05, "optim": "sgd", "gradient_accumulation_steps": 2}
    common["gradient_checkpointing"] = checkpointing
    for mine in (False, True):  # one after the other: making a trainer resets accelerate's state
        if mine:
            trainer = ours(tmp_path, make_model(), batch_size=2, lr_scheduler="cosine", **common)
        else:
            size = {"per_device_train_batch_size": 2, "lr_scheduler_type": "cosine", "disable_tqdm": True}
            trainer = stock(tmp_path, make_model(), **size, **common)
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        logs.append([row for row in trainer.state.log_history if "grad_norm" in row])
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    assert float((weights[1] - weights[0]).norm() / (weights[0] - start).norm()) <= 1e-5
    for theirs, row in zip(*logs, strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "num_tokens"):
            assert row[name] == pytest.approx(theirs[name], rel=1e-4), name


def test_the_same_prompt_is_computed_once(tmp_path: Path) -> None:
    same = [{"input_ids": [5, 6, 7, 8, n], "labels": [-100, -100, -100, 8, n]} for n in (9, 10, 11)]
    shared = batch_of(same, CPU)
    assert shared.prompts == [[5, 6, 7]] and shared.packed_tokens(range(3)) == 3 + 3 * 2
    results = []
    for copies in (same, [{**row, "input_ids": list(row["input_ids"])} for row in same]):
        model = make_model()
        trainer = ours(tmp_path, model)
        batch = batch_of(copies, CPU)
        if copies is not same:  # each with a prompt of its own
            batch.prompts, batch.prompt_of = batch.prompts * 3, [0, 1, 2]
        trainer.tokens_per_step = 6.0
        update(trainer, model, batch)
        results.append(gradient_of(model))
    assert float((results[0] - results[1]).norm() / results[0].norm()) <= 1e-5


def test_the_head_sees_only_positions_with_a_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from algorist.training import log_probs

    seen: list[int] = []
    real = log_probs.completion_log_probs

    def watched(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(hidden.shape[0])
        return real(hidden, *args, **kwargs)

    trainer = ours(tmp_path, make_model())
    trainer.log_probs.verify, trainer.passes.part_tokens = False, None  # neither compared nor counted
    monkeypatch.setattr(log_probs, "completion_log_probs", watched)
    our_step(trainer)
    assert seen == [sum(label != -100 for row in rows() for label in row["labels"])]


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
    """Attention goes in float32 on the CPU, whose flash kernel goes backward in bfloat16 many times as long."""
    attention = AttentionTypes()

    def gradient(mine: bool, half: bool) -> torch.Tensor:
        model = make_model()
        if half:
            set_compute(model, torch.bfloat16)
        trainer = ours(tmp_path, model) if mine else stock(tmp_path, model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half), attention:
            attention.seen.clear()
            return (our_step if mine else stock_step)(trainer)[1]

    exact = gradient(mine=False, half=False)
    theirs, own = (float((gradient(mine, half=True) - exact).norm() / exact.norm()) for mine in (False, True))
    assert 1e-4 < own <= 1.5 * theirs < 0.1  # differences of single roundings
    assert torch.float32 in attention.seen


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
