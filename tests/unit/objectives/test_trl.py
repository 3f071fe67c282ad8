"""``policy_loss`` and the advantages against TRL's own code, value and gradient."""

from __future__ import annotations

import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from algorist.objectives import (
    batch_normalized,
    group_centered,
    group_normalized,
    policy_loss,
    token_losses,
    top_entropy_mask,
)
from algorist.training.metrics import Metrics

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
trl = pytest.importorskip("trl")
B, T, LONGEST = 6, 7, 9


class TheirLoss(trl.GRPOTrainer):  # type: ignore[misc, name-defined]
    """TRL's ``_compute_loss`` on given log-probs: its own code, without a model and a data set around it."""

    def __init__(self, log_probs: Tensor, **settings: Any) -> None:
        from accelerate import Accelerator

        self.log_probs = log_probs
        self.accelerator = Accelerator(cpu=True)
        self.model = SimpleNamespace(training=True)
        self.args = SimpleNamespace(
            delta=settings.get("delta"),
            use_bias_correction_kl=settings.get("unbiased_kl", False),
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        )
        self.loss_type = settings["loss_type"]
        self.importance_sampling_level = settings.get("importance", "token")
        self.beta = settings.get("beta", 0.0)
        self.epsilon_low, self.epsilon_high = settings.get("clip_low", 0.2), settings.get("clip_high", 0.2)
        self.max_completion_length = LONGEST
        self.current_gradient_accumulation_steps = 1
        self.top_entropy_quantile, self.off_policy_mask_threshold = 1.0, None
        self.use_vllm = self.vllm_importance_sampling_correction = False
        self._entropy_bonus_enabled = self.aux_loss_enabled = False
        self._metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list)}

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
        return self.log_probs, torch.zeros_like(self.log_probs), None


def batch(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([7, 3, 5, 1, 6, 2])
    base = -torch.rand(B, T, generator=g, dtype=torch.float64) * 3
    return {
        "log_probs": base,
        "old": base + 0.5 * torch.randn(B, T, generator=g, dtype=torch.float64),
        "ref": base + 0.3 * torch.randn(B, T, generator=g, dtype=torch.float64),
        "advantages": torch.randn(B, generator=g, dtype=torch.float64),
        "mask": (torch.arange(T) < lengths[:, None]).long(),
    }


CASES: list[dict[str, Any]] = [
    {"loss_type": "grpo"},
    {"loss_type": "grpo", "clip_low": 0.1, "clip_high": 0.28, "beta": 0.04},
    {"loss_type": "grpo", "delta": 1.5},
    {"loss_type": "bnpo"},
    {"loss_type": "bnpo", "beta": 0.1},
    {"loss_type": "dr_grpo"},
    {"loss_type": "dapo", "clip_high": 0.28},
    {"loss_type": "dapo", "beta": 0.05, "importance": "sequence"},
    {"loss_type": "cispo", "clip_high": 1.3},
    {"loss_type": "gspo", "clip_low": 3e-2, "clip_high": 4e-2},
    {"loss_type": "sapo"},
    {"loss_type": "luspo", "clip_low": 2e-3, "clip_high": 2.5e-3},
    {"loss_type": "vespo"},
    {"loss_type": "vespo", "beta": 0.05},
    {"loss_type": "dapo", "beta": 0.05, "unbiased_kl": True},
    {"loss_type": "grpo", "beta": 0.05, "unbiased_kl": True, "importance": "sequence"},
]


@pytest.mark.parametrize("on_policy", [False, True], ids=["off-policy", "on-policy"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_policy_loss_equals_trl(case: dict[str, Any], on_policy: bool) -> None:
    b = batch()
    settings = dict(case)
    ours_lp, theirs_lp = (b["log_probs"].clone().requires_grad_() for _ in range(2))
    tokens = float(b["mask"].sum())
    denominator = {"dr_grpo": LONGEST, "dapo": tokens, "cispo": tokens, "vespo": tokens}.get(
        case["loss_type"]
    )
    ours_settings = {k: v for k, v in settings.items() if k != "loss_type"}
    ours = policy_loss(
        ours_lp,
        b["advantages"],
        b["mask"],
        old_log_probs=None if on_policy else b["old"],
        ref_log_probs=b["ref"],
        denominator=denominator,
        loss=case["loss_type"],
        **ours_settings,
    )
    if settings["loss_type"] in ("gspo", "luspo"):  # TRL has no gspo: it is grpo with ratios of sequences
        settings |= {"loss_type": settings["loss_type"].replace("gspo", "grpo"), "importance": "sequence"}
    theirs = TheirLoss(theirs_lp, **settings)._compute_loss(
        None,
        {
            "prompt_ids": torch.zeros(B, 1, dtype=torch.long),
            "prompt_mask": torch.ones(B, 1, dtype=torch.long),
            "completion_ids": torch.zeros(B, T, dtype=torch.long),
            "completion_mask": b["mask"],
            "advantages": b["advantages"],
            "old_per_token_logps": None if on_policy else b["old"],
            "ref_per_token_logps": b["ref"],
            "num_items_in_batch": torch.tensor(tokens),
        },
    )
    ours.backward()
    theirs.backward()
    exact = 1e-5 if case["loss_type"] == "sapo" else 1e-9  # TRL's temperatures are float32 there
    assert ours.item() == pytest.approx(theirs.item(), rel=exact, abs=1e-12)
    assert theirs_lp.grad is not None and theirs_lp.grad.abs().max() > 0
    torch.testing.assert_close(ours_lp.grad, theirs_lp.grad, rtol=exact, atol=1e-12)


@pytest.mark.parametrize("importance", ["token", "sequence"])
def test_clip_metrics_equal_trl(importance: str) -> None:
    b = batch(3)
    trainer = TheirLoss(b["log_probs"].clone().requires_grad_(), loss_type="dapo", importance=importance)
    inputs = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.long),
        "prompt_mask": torch.ones(B, 1, dtype=torch.long),
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": b["mask"],
        "advantages": b["advantages"],
        "old_per_token_logps": b["old"],
        "num_items_in_batch": b["mask"].sum().float(),
    }
    trainer._compute_loss(None, inputs)
    _, values = token_losses(
        b["log_probs"], b["advantages"], b["mask"], old_log_probs=b["old"], importance=importance
    )
    metrics = Metrics()
    for name, value in values.items():
        metrics.add(name, value, b["mask"].bool())
    theirs = trainer._metrics["train"]
    assert 0 < metrics.values()["clip_ratio/region_mean"] < 1
    for name, value in metrics.values().items():
        assert value == pytest.approx(theirs[name][0], rel=1e-6), name


def test_advantages_equal_trl_formulae() -> None:
    from trl.trainer.utils import nanstd

    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0, 2.0, float("nan"), 1.0, 3.0])
    grouped = rewards.view(3, 3)
    centered = (rewards - torch.nanmean(grouped, dim=1).repeat_interleave(3)).nan_to_num(nan=0.0)
    deviation = nanstd(grouped, dim=1).repeat_interleave(3)
    torch.testing.assert_close(group_centered(grouped).flatten(), centered)
    torch.testing.assert_close(group_normalized(grouped).flatten(), centered / (deviation + 1e-4))
    torch.testing.assert_close(batch_normalized(grouped).flatten(), centered / (nanstd(rewards) + 1e-4))


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_top_entropy_mask_equals_trl(share: float) -> None:
    b = batch()
    entropy = -b["log_probs"]
    theirs = TheirLoss(b["log_probs"], loss_type="dapo").get_high_entropy_mask(entropy, b["mask"], 1 - share)
    ours = top_entropy_mask(entropy, b["mask"], entropy[b["mask"].bool()], share)
    assert torch.equal(ours, theirs) and 0 < int(ours.sum()) <= int(b["mask"].sum())
    assert not top_entropy_mask(entropy, b["mask"] * 0, entropy[:0, 0], share).any()
