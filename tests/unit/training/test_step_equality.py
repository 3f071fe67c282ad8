"""Loss and gradient of a step against stock TRL's on the same batch, float32, relative L2 ≤ 1e-5."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl import GRPOTrainer

from algorist.config.load import load_recipe
from algorist.extensions.weights import Weights
from algorist.objectives import LOSSES
from algorist.objectives.ratios import Correction
from algorist.training.batch import Batch
from algorist.training.extension import Extensions
from algorist.training.step import in_parts
from tests.tiny import TOKENIZER, PlainEngine, make_model, make_trainer, penalise

TRL_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
ROWS, PROMPT, WIDTH = 8, 9, 10


def padded(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two prompts of unequal length, completions of unequal length, one row masked out, two without advantage."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(3, len(TOKENIZER), shape, generator=generator)

    prompt_ids = torch.zeros(ROWS, PROMPT, dtype=torch.long)
    prompt_mask = torch.zeros_like(prompt_ids)
    for start, size in ((0, 9), (4, 5)):
        prompt_ids[start : start + 4, PROMPT - size :] = tokens(size)
        prompt_mask[start : start + 4, PROMPT - size :] = 1
    lengths = torch.tensor([10, 3, 1, 7, 9, 4, 10, 6])
    mask = (torch.arange(WIDTH)[None] < lengths[:, None]).long()
    mask[6] = 0  # mask_truncated_completions
    advantages = torch.randn(ROWS, generator=generator)
    advantages[1] = advantages[5] = 0.0
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": tokens(ROWS, WIDTH) * (torch.arange(WIDTH)[None] < lengths[:, None]),
        "completion_mask": mask,
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
    }


def as_batch(inputs: dict[str, torch.Tensor]) -> Batch:
    """Return the same rows as ours: a masked row has its ten tokens, of which none counts."""
    prompts = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
    ]
    sizes = [int(n) or WIDTH for n in inputs["completion_mask"].sum(1)]
    return Batch(
        prompts=[prompts[0], prompts[4]],
        completions=[ids[:n].tolist() for ids, n in zip(inputs["completion_ids"], sizes, strict=True)],
        prompt_of=[0] * 4 + [1] * 4,
        advantages=inputs["advantages"],
        mask=inputs["completion_mask"].bool(),
        old_log_probs=inputs.get("old_per_token_logps"),
        extra={"ref": inputs["ref_per_token_logps"]},
        sampler_log_probs=inputs.get("sampling_per_token_logps"),
    )


def with_old_and_reference(
    trainer: Any, inputs: dict[str, torch.Tensor], off_policy: bool
) -> dict[str, torch.Tensor]:
    """Add reference log-probs and, if asked for, old ones far enough away that clipping runs."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        log_probs, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(
            trainer, trainer.model, ids, mask, WIDTH
        )
    noise = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(3))
    result = {**inputs, "ref_per_token_logps": log_probs + 0.2 * noise * inputs["completion_mask"]}
    if off_policy:
        result["old_per_token_logps"] = log_probs - 0.4 * noise * inputs["completion_mask"]
    return result


def gradient_of(trainer: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad])


def theirs(trainer: Any, inputs: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, dict(inputs))
    loss.backward()
    return float(loss.detach()), gradient_of(trainer)


def ours(
    trainer: Any, inputs: dict[str, torch.Tensor], *, correct: bool = False
) -> tuple[float, torch.Tensor, dict[str, float]]:
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.tokens_per_step = float(inputs["num_items_in_batch"])
    batch = as_batch(inputs)
    for extension in trainer.extensions if correct else ():
        batch = extension.batch(batch, trainer)
    loss, metrics = in_parts(trainer, trainer.model, batch)
    return float(loss), gradient_of(trainer), metrics.values()


@pytest.fixture(scope="module", params=["full", "lora"])
def trainers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder: Path = tmp_path_factory.mktemp("runs")
    pair = []
    for stock in (True, False):
        model: Any = make_model()
        torch.manual_seed(1)
        if request.param == "lora":
            lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
            model = get_peft_model(model, lora)
        trainer = make_trainer(folder, model, engine=PlainEngine(model), stock=stock, temperature=0.9)
        trainer.current_gradient_accumulation_steps = 1
        pair.append(trainer)
    return pair[0], pair[1]


def settle(
    trainers: tuple[Any, Any], loss: str, *, beta: float = 0.0, level: str = "token", high: float = 0.2
) -> None:
    """Give both trainers the same objective."""
    stock, mine = trainers
    stock.loss_type, stock.beta, stock.importance_sampling_level, stock.epsilon_high = loss, beta, level, high
    takes = LOSSES.get(loss).parameters
    settings = {"importance": level, "clip_low": 0.2, "clip_high": high}
    mine.objective = replace(
        mine.objective,
        loss=LOSSES.get(loss).with_settings({k: v for k, v in settings.items() if k in takes}),
        skip=True,
    )
    penalise(mine, beta)
    mine.passes.part_tokens = None


def same(stock: tuple[float, torch.Tensor], mine: tuple[float, torch.Tensor, Any]) -> None:
    assert stock[1].norm() > 1e-3
    assert float((stock[1] - mine[1]).norm() / stock[1].norm()) <= 1e-5
    assert mine[0] == pytest.approx(stock[0], rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("off_policy", [False, True], ids=["ratio 1", "ratio not 1"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss", TRL_LOSSES)
def test_loss_and_gradient(trainers: tuple[Any, Any], loss: str, beta: float, off_policy: bool) -> None:
    stock, mine = trainers
    level = "sequence" if loss == "luspo" else "token"
    settle(trainers, loss, beta=beta, level=level, high=2.0 if loss == "cispo" else 0.28)
    inputs = with_old_and_reference(stock, padded(), off_policy)
    expected, found = theirs(stock, inputs), ours(mine, inputs)
    same(expected, found)
    logged = stock._metrics["train"]
    for name, value in found[2].items():
        if name == "vespo/phi_seq_mean":  # TRL counts the masked completion too
            continue
        if name in logged and (name != "entropy" or beta):  # with skipped rows the entropy is of the others
            assert value == pytest.approx(logged[name][-1], rel=1e-4, abs=1e-6), name
    if off_policy and loss in ("grpo", "bnpo", "dr_grpo", "dapo"):
        assert found[2]["clip_ratio/region_mean"] > 0.05  # clipping did run


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("switch", ["sequence ratio", "token budget", "one row at a time", "delta"])
def test_settings(trainers: tuple[Any, Any], switch: str, skip: bool) -> None:
    stock, mine = trainers
    settle(trainers, "grpo", level="sequence" if switch == "sequence ratio" else "token")
    inputs = with_old_and_reference(stock, padded(1), True)
    mine.objective = replace(mine.objective, skip=skip)
    mine.passes.part_tokens = {"token budget": 20, "one row at a time": 1}.get(switch)
    if switch == "delta":
        stock.args.delta = 1.4
        mine.objective = replace(mine.objective, loss=mine.objective.loss.with_settings({"delta": 1.4}))
    try:
        same(theirs(stock, inputs), ours(mine, inputs))
    finally:
        stock.args.delta = None


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_a_sampler_that_differs_is_corrected(
    trainers: tuple[Any, Any], mode: Correction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL multiplies its loss by weights that it makes while it samples: here they are made by hand, in float64."""
    stock, mine = trainers
    settle(trainers, "grpo")
    bounds = "low: 0.8, high: 1.3"
    low, high, spread = 0.8, 1.3, 0.08 if mode.startswith("sequence") else 0.2
    correction = Weights(
        load_recipe("smoke-cpu", [f"grpo.sampler_correction={{mode: {mode}, {bounds}}}"]).recipe
    )
    correction.needs_old_log_probs = True
    mine.extensions = Extensions([correction])
    inputs = with_old_and_reference(stock, padded(2), True)
    noise = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(4))
    inputs["sampling_per_token_logps"] = inputs["old_per_token_logps"] + spread * noise
    inputs["sampling_per_token_logps"][0, 1] = torch.nan  # the sampler gave none: not corrected
    difference = (
        (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]).double().nan_to_num(nan=0.0)
    )
    difference = difference * inputs["completion_mask"]
    weights = (difference.sum(1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    outside = (weights < low) | (weights > high)
    assert outside.any() and not outside.all()
    weights = weights.clamp(low, high) if mode.endswith("truncate") else weights * ~outside
    monkeypatch.setattr(stock, "use_vllm", True)
    monkeypatch.setattr(stock, "vllm_importance_sampling_correction", True)
    same(
        theirs(stock, {**inputs, "importance_sampling_ratio": weights.float()}),
        ours(mine, inputs, correct=True),
    )
    mine.extensions = Extensions()


def test_skipping_computes_fewer_rows_and_keeps_logged_means(
    trainers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from algorist.training import log_probs

    stock, mine = trainers
    settle(trainers, "dapo")
    inputs = with_old_and_reference(stock, padded(), True)
    targets: list[int] = []
    original = log_probs.pack

    def counting(*args: Any, **kwargs: Any) -> Any:
        layout = original(*args, **kwargs)
        targets.append(len(layout.targets_M))
        return layout

    ours(mine, inputs)  # the first use compares the passes
    monkeypatch.setattr(log_probs, "pack", counting)
    _, _, found = ours(mine, inputs)
    rows = inputs["completion_mask"].sum(1)
    assert targets == [int(rows.sum() - rows[1] - rows[5])]
    theirs(stock, inputs)
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/low_min", "clip_ratio/high_max"):
        assert found[name] == pytest.approx(stock._metrics["train"][name][-1], abs=1e-6), name


@pytest.mark.parametrize("what", ["advantages", "completion_mask"])
def test_batch_without_any_signal_gives_zero_gradients(trainers: tuple[Any, Any], what: str) -> None:
    """TRL takes an optimizer step with zero gradients there (momentum still moves the weights), so must we."""
    settle(trainers, "dapo")
    inputs = with_old_and_reference(trainers[0], padded(), False)
    inputs[what] = torch.zeros_like(inputs[what])
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum().clamp(min=1)
    for loss, gradient in (theirs(trainers[0], inputs), ours(trainers[1], inputs)[:2]):
        assert loss == 0.0 and gradient.numel() > 0 and float(gradient.abs().max()) == 0.0
