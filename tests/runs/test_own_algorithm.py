"""A user's own loss and advantage: used as they are, logged under their names, and mistakes in them told in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from algorist.config import load_recipe
from algorist.errors import ConfigError
from algorist.objectives import LOSSES, policy_loss
from algorist.runs.pipeline import Quiet, run_recipe
from tests.tiny import make_trainer, parameters_of

OWN = """
import torch
from algorist import loss

def ranks(rewards):
    order = rewards.argsort(-1).argsort(-1).float()
    return order - order.mean(-1, keepdim=True)

def dapo(log_probs, old_log_probs, advantages, mask, clip_low=0.2, clip_high=0.2):
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    lower = torch.minimum(ratio * advantages, clipped * advantages)
    return -lower, {"reward": torch.ones_like(mask[:, 0], dtype=torch.float), "size": 3.0}

def scalar(log_probs):
    return log_probs.sum()

def rows(log_probs):
    return log_probs.sum(-1)

def constant(mask):
    return mask.float()

def wrong(log_probs):
    raise ValueError("my bug")

def demanding(log_probs, beta_two):
    return log_probs

def two(rewards, size):
    return rewards

def nothing(rewards):
    return rewards * float("nan")

def listed(rewards):
    return rewards.tolist()

def narrow(rewards):
    return rewards.mean(-1)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_an_own_loss_with_dapos_formula_trains_as_dapo_does(own: Path, tmp_path: Path) -> None:
    moved, logs = [], []
    for name in ("dapo", f"{own}:dapo"):
        trainer = make_trainer(tmp_path, loss=name, optim="sgd", learning_rate=0.05, num_iterations=2)
        before = parameters_of(trainer)
        trainer.train()
        moved.append(parameters_of(trainer) - before)
        logs.append(trainer.state.log_history[0])
    assert moved[0].norm() > 1e-3 and float((moved[0] - moved[1]).norm() / moved[0].norm()) < 1e-5
    assert logs[1]["reward"] == pytest.approx(logs[0]["reward"])  # a metric of that name does not replace it
    assert logs[1]["loss/reward"] == 1.0 and logs[1]["loss/size"] == 3.0


def test_the_own_advantage_is_what_is_trained_and_stored(own: Path, tmp_path: Path) -> None:
    kept: list[Any] = []
    trainer = make_trainer(
        tmp_path,
        advantage=f"{own}:ranks",
        on_rollouts=lambda step, groups, advantages: kept.append((groups, advantages)),
    )
    trainer.train()
    for groups, advantages in kept:
        rewards = torch.tensor([[r.reward for r in group.rollouts] for group in groups])
        order = rewards.argsort(-1).argsort(-1).float()
        assert torch.equal(advantages, order - order.mean(-1, keepdim=True))
    assert torch.equal(trainer.rollouts.advantages, kept[-1][1].flatten())


MISTAKES = {
    "loss:scalar": r"own.py:scalar' returned shape \(\); expected the loss per token",
    "loss:rows": r"own.py:rows' returned shape \(8,\); expected the loss per token",
    "loss:constant": r"own.py:constant' does not depend on log_probs",
    "loss:wrong": r"own.py:wrong raised ValueError in own.py:\d+: my bug",
    "loss:demanding": r"asks for beta_two.*give every other parameter a default value",
    "loss:misspelt": r"has no function 'misspelt'",
    "advantage:two": r"takes \(rewards, size\); expected one argument, the rewards",
    "advantage:nothing": r"advantage 'nothing' is not finite for the rewards \[",
    "advantage:listed": r"advantage 'listed' returned list for rewards of shape \(2, 4\)",
    "advantage:narrow": r"advantage 'narrow' returned \(2,\) for rewards of shape \(2, 4\)",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_in_one_sentence(own: Path, tmp_path: Path, mistake: str) -> None:
    key, _, name = mistake.partition(":")
    with pytest.raises(ConfigError, match=MISTAKES[mistake]):
        make_trainer(tmp_path, **{key: f"{own}:{name}"}).train()


def test_a_mistake_in_the_file_is_found_before_anything_is_loaded(own: Path, tmp_path: Path) -> None:
    recipe = load_recipe(
        "smoke-cpu", [f"output_dir={tmp_path}", "run_name=r", f"grpo.loss={own}:misspelt"]
    ).recipe
    with pytest.raises(ConfigError, match="has no function 'misspelt'"):
        run_recipe(recipe, display=Quiet())
    assert not (tmp_path / "r").exists()


def test_a_function_serves_where_a_name_does() -> None:
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)

    def reinforce(log_probs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return -advantages * log_probs

    mask = torch.ones(1, 2, dtype=torch.bool)
    assert policy_loss(log_probs, torch.tensor([2.0]), mask, loss=reinforce).item() == pytest.approx(3.0)
    assert LOSSES.get("dapo").prefix == ""
