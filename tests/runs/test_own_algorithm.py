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
import sys
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

def three(log_probs):
    return log_probs, {}, {}

def metrics_listed(log_probs):
    return log_probs, [("size", 1.0)]

def metric_long(log_probs):
    return log_probs, {"size": torch.ones(5)}

def metric_text(log_probs):
    return log_probs, {"size": "large"}

def complex_values(log_probs):
    return log_probs * 1j

def exits(log_probs):
    sys.exit(0)

def exits_later(log_probs):
    if log_probs.shape[1] > 3:
        sys.exit(0)
    return log_probs

def endless(log_probs, advantages):
    return log_probs * 0 + (torch.inf if log_probs.shape[1] > 3 else 1.0)

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
    assert torch.equal(trainer.rollouts.advantages[:, 0], kept[-1][1].flatten())


MISTAKES = {
    "loss:scalar": r"own.py:scalar' returned shape \(\); expected the loss per token",
    "loss:rows": r"own.py:rows' returned shape \(2,\); expected the loss per token, \(2, 3\) like log_probs, or \(2, 1\)",
    "loss:three": r"own.py:three' returned 3 values; expected the loss per token",
    "loss:metrics_listed": r"returned metrics as list; expected a dictionary",
    "loss:metric_long": r"the metric 'size' as shape \(5,\); expected a number, one for each completion \(2,\)",
    "loss:metric_text": r"the metric 'size' as str; expected a number",
    "loss:complex_values": r"returned complex64; expected the loss per token",
    "loss:exits": r"own.py:exits raised SystemExit in own.py:\d+: 0",
    "loss:exits_later": r"own.py:exits_later raised SystemExit",
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


REWARDS = """
import sys

def text(completion):
    return "good"

def listed(rollout):
    return [1.0, 2.0]

def one_for_all(completions, **columns):
    return [1.0]

async def later(rollout):
    return 1.0

def exits(completion, *, trainer_state=None):
    sys.exit(0)
"""


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("grpo.loss=OWN:misspelt", "has no function 'misspelt'"),
        ("grpo.loss=OWN:scalar", r"returned shape \(\); expected the loss per token"),
        ("grpo.loss=OWN:exits", "raised SystemExit"),
        ("grpo.loss={name: 'OWN:dapo', clip: 1}", r"grpo.loss.clip: the loss '.*' has no parameter 'clip'.*clip_low"),
        ("grpo.loss={name: 'OWN:dapo', clip_low: near}", r"grpo.loss.clip_low, a parameter of .*valid number"),
        ("grpo.advantage=OWN:narrow", r"returned \(2,\) for rewards of shape \(2, 4\)"),
        ("rewards=[REWARDS:text]", "reward 'text' returned a value of type str; expected a number or None"),
        ("rewards=[REWARDS:listed]", "reward 'listed' returned a value of type list"),
        ("rewards=[REWARDS:one_for_all]", "reward 'one_for_all' returned 1 values for 2 completions"),
        ("rewards=[REWARDS:later]", "reward 'later' is async; expected def f"),
        ("rewards=[REWARDS:exits]", "reward 'exits' ended the program"),
        ("rewards=[{name: xmlcount, params: {penalty: much}}]", r"rewards.xmlcount.penalty, .*valid number"),
        ("rewards=[{name: repetition, params: {ngram: [3]}}]", r"rewards.repetition.ngram, .*valid integer"),
        ("rewards=[{name: cosine, params: {max_len: null}}]", r"rewards.cosine.max_len, .*valid integer"),
    ],
)  # fmt: skip
def test_a_mistake_in_own_code_is_found_before_anything_is_loaded(
    own: Path, tmp_path: Path, setting: str, message: str
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    setting = setting.replace("OWN", str(own)).replace("REWARDS", str(tmp_path / "rewards.py"))
    recipe = load_recipe("smoke-cpu", [f"output_dir={tmp_path}", "run_name=r", setting]).recipe
    with pytest.raises(ConfigError, match=message):
        run_recipe(recipe, display=Quiet())
    assert not (tmp_path / "r").exists()


def test_an_advantage_of_two_rewards_is_tried_with_two(tmp_path: Path) -> None:
    text = "def second(rewards_PG, components_PGK, weights_K):\n    return components_PGK[..., 1] * weights_K[1]\n"
    (tmp_path / "second.py").write_text(text)
    settings = [
        f"grpo.advantage={tmp_path}/second.py:second",
        f"output_dir={tmp_path}",
        "sft.enabled=false",
        "grpo.max_steps=1",
    ]
    two = load_recipe("smoke-cpu", [*settings, "rewards=[correct, well_formed]", "run_name=two"]).recipe
    assert not run_recipe(two, display=Quiet()).stopped
    one = load_recipe("smoke-cpu", [*settings, "rewards=[correct]", "run_name=one"]).recipe
    with pytest.raises(ConfigError, match=r"second.*index 1 is out of bounds"):
        run_recipe(one, display=Quiet())


def test_an_infinite_loss_without_a_gradient_is_a_step_that_is_left_out(own: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, loss=f"{own}:endless", max_steps=2)
    before = parameters_of(trainer)
    trainer.train()
    assert [line.get("update/skipped") for line in trainer.state.log_history[:2]] == [1.0, 1.0]
    assert torch.equal(before, parameters_of(trainer))


def test_a_function_serves_where_a_name_does() -> None:
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)

    def reinforce(log_probs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return -advantages * log_probs

    mask = torch.ones(1, 2, dtype=torch.bool)
    assert policy_loss(log_probs, torch.tensor([2.0]), mask, loss=reinforce).item() == pytest.approx(3.0)
    assert LOSSES.get("dapo").prefix == ""
