"""Loss and gradient of the fast update against stock TRL's on the same batch, float32, relative L2 ≤ 1e-5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from algorist.training.grpo import AlgoristGRPOTrainer
from tests.unit.test_grpo_trainer import TOKENIZER, make, make_model

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
ROWS, PROMPT, WIDTH = 8, 9, 10


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two prompts of unequal length, completions of unequal length, one row masked out, two without advantage."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(3, len(TOKENIZER), shape, generator=generator)

    prompt_ids, prompt_mask = (
        torch.zeros(ROWS, PROMPT, dtype=torch.long),
        torch.zeros(ROWS, PROMPT, dtype=torch.long),
    )
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


def loss_and_gradient(trainer: Any, inputs: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, dict(inputs))
    loss.backward()
    gradient = [p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad]
    return float(loss.detach()), torch.cat(gradient)


@pytest.fixture(scope="module", params=["full", "lora"])
def trainers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder: Path = tmp_path_factory.mktemp("runs")
    lora = None
    if request.param == "lora":
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    pair = []
    for cls in (GRPOTrainer, AlgoristGRPOTrainer):
        torch.manual_seed(1)
        trainer = make(cls, folder, make_model(), peft_config=lora, changes={"temperature": 0.9})
        trainer.current_gradient_accumulation_steps = 1
        pair.append(trainer)
    state = {k: v.clone() for k, v in pair[0].model.state_dict().items()}
    pair[1].model.load_state_dict(state)
    return pair[0], pair[1]


def set_all(trainers: tuple[Any, Any], **values: Any) -> None:
    for trainer in trainers:
        for name, value in values.items():
            setattr(trainer, name, value)


@pytest.mark.parametrize("off_policy", [False, True], ids=["ratio 1", "ratio not 1"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_and_gradient(trainers: tuple[Any, Any], loss_type: str, beta: float, off_policy: bool) -> None:
    stock, ours = trainers
    level = "sequence" if loss_type == "luspo" else "token"
    high = 2.0 if loss_type == "cispo" else 0.28
    set_all(trainers, loss_type=loss_type, beta=beta, importance_sampling_level=level, epsilon_high=high)
    inputs = with_old_and_reference(stock, batch(), off_policy)
    loss, gradient = loss_and_gradient(stock, inputs)
    our_loss, our_gradient = loss_and_gradient(ours, inputs)
    assert gradient.norm() > 1e-3
    assert float((gradient - our_gradient).norm() / gradient.norm()) <= 1e-5
    assert our_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    if off_policy and loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"):
        clipped = ours._metrics["train"]["clip_ratio/region_mean"][-1]
        assert clipped > 0.05  # clipping did run
        assert clipped == pytest.approx(stock._metrics["train"]["clip_ratio/region_mean"][-1], abs=1e-6)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    "switch", ["sequence ratio", "entropy bonus", "entropy quantile", "token budget", "delta"]
)
def test_settings(trainers: tuple[Any, Any], switch: str, skip: bool) -> None:
    stock, ours = trainers
    set_all(trainers, loss_type="grpo", beta=0.0, importance_sampling_level="token", epsilon_high=0.2)
    inputs = with_old_and_reference(stock, batch(1), True)
    ours.skip_zero_advantage = skip
    if switch == "sequence ratio":
        set_all(trainers, importance_sampling_level="sequence")
    elif switch == "entropy bonus":
        set_all(trainers, _entropy_bonus_enabled=True, entropy_coef=0.1)
    elif switch == "entropy quantile":
        set_all(trainers, top_entropy_quantile=0.5)
    elif switch == "token budget":
        ours._update.micro_batch_tokens = 20
    else:
        for trainer in trainers:
            trainer.args.delta = 1.4
    try:
        loss, gradient = loss_and_gradient(stock, inputs)
        our_loss, our_gradient = loss_and_gradient(ours, inputs)
    finally:
        set_all(trainers, _entropy_bonus_enabled=False, top_entropy_quantile=1.0)
        ours._update.micro_batch_tokens, ours.skip_zero_advantage = None, True
        for trainer in trainers:
            trainer.args.delta = None
    assert float((gradient - our_gradient).norm() / gradient.norm()) <= 1e-5
    assert our_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)


def test_skipping_computes_fewer_rows_and_keeps_logged_means(
    trainers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from algorist.training import update

    stock, ours = trainers
    set_all(trainers, loss_type="dapo", beta=0.0, importance_sampling_level="token", epsilon_high=0.2)
    inputs = with_old_and_reference(stock, batch(), True)
    targets: list[int] = []
    original = update.pack

    def counting(*args: Any, **kwargs: Any) -> Any:
        layout = original(*args, **kwargs)
        targets.append(len(layout.targets_M))
        return layout

    monkeypatch.setattr(update, "pack", counting)
    loss_and_gradient(ours, inputs)
    rows = inputs["completion_mask"].sum(1)
    assert targets == [int(rows.sum() - rows[1] - rows[5])]
    loss_and_gradient(stock, inputs)
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/low_min", "clip_ratio/high_max"):
        expected, found = (trainer._metrics["train"][name][-1] for trainer in trainers)
        assert found == pytest.approx(expected, abs=1e-6), name


@pytest.mark.parametrize("what", ["advantages", "completion_mask"])
def test_batch_without_any_signal_gives_zero_gradients(trainers: tuple[Any, Any], what: str) -> None:
    """TRL takes an optimizer step with zero gradients there (momentum still moves the weights), so must we."""
    set_all(trainers, loss_type="dapo", beta=0.0, importance_sampling_level="token")
    inputs = batch()
    inputs[what] = torch.zeros_like(inputs[what])
    for trainer in trainers:
        loss, gradient = loss_and_gradient(trainer, inputs)
        assert loss == 0.0 and gradient.numel() > 0 and float(gradient.abs().max()) == 0.0
