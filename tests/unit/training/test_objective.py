"""MaxRL, W-REINFORCE, prompt averages, the off-policy mask and the entropy control against independent float64 versions."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trl import GRPOTrainer

from algorist.config.load import load_recipe
from algorist.errors import ConfigError
from algorist.extensions.weights import Weights, drop_equal_groups, weigh_positive
from algorist.objectives import (
    LOSSES,
    Objective,
    group_centered,
    maxrl,
    mean_lengths,
    on_policy_sequences,
    policy_loss,
    reinforce,
    token_weights,
)
from algorist.objectives.reductions import Reduction
from algorist.rewards import build_rewards
from algorist.runs.draft import Draft
from algorist.runs.pipeline import Quiet, run_recipe
from algorist.runs.plan import make_plan
from algorist.training.batch import Batch
from algorist.training.extension import Event, Extensions
from algorist.training.grpo_setup import check_rewards
from algorist.training.metrics import Metrics
from algorist.training.objective import LossInputs, loss_of
from algorist.training.step import in_parts
from tests.tiny import make_trainer, raw_format, section, smoke_recipe

NAN = float("nan")
RNG = np.random.default_rng(5)


def recipe(*settings: str) -> Any:
    return load_recipe("smoke-cpu", settings).recipe


def test_maxrl_divides_by_the_groups_mean() -> None:
    rewards = RNG.random((3, 4))
    rewards[1] = 0.0
    expected = np.zeros((3, 4))
    for row in (0, 2):
        mean = rewards[row].mean()
        expected[row] = (rewards[row] - mean) / mean
    np.testing.assert_allclose(maxrl(torch.tensor(rewards)).numpy(), expected, rtol=1e-12)
    assert maxrl(torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1]])).tolist() == [[3, -1, -1, -1], [0, 0, 0, 0]]
    np.testing.assert_allclose(maxrl(torch.tensor([[1.0, 0.0, NAN]])).numpy(), [[1.0, -1.0, 0.0]])


def test_maxrl_refuses_rewards_below_zero() -> None:
    form = raw_format()
    punished = build_rewards(["correct", "soft_overlong"], form)
    with pytest.raises(ConfigError, match=r"divides by the group's mean reward.* can be -1"):
        check_rewards(section(advantage="maxrl"), punished)
    check_rewards(section(advantage="leave_one_out"), punished)
    check_rewards(section(advantage="maxrl"), build_rewards(["correct"], form))


def test_reinforce_counts_the_heaviest_reward_alone() -> None:
    components = torch.tensor([[[0.2, 1.0], [1.0, 0.0], [1.0, NAN]]])  # well_formed, correct
    weights = torch.tensor([0.2, 1.0])
    rewards = (components * weights).sum(-1)
    assert reinforce(rewards, components, weights).tolist() == [[1.0, -1.0, 0.0]]


def batch_of(advantages: torch.Tensor, lengths: list[int], **tensors: Any) -> Batch:
    width = max(lengths)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    completions = [list(range(3, 3 + n)) for n in lengths]
    size = len(lengths) // 2
    return Batch([[1], [2]], completions, [0] * size + [1] * size, advantages, mask, **tensors)


@pytest.mark.parametrize("weight", [0.1, 0.0])
def test_w_reinforce_weighs_right_completions(weight: float) -> None:
    """The loss is -λ·log p of right completions plus log p of wrong ones: 2506.01347, λ = 0 is NSR."""
    right, lengths = np.array([1, 0, 0, 1]), [2, 3, 1, 2]
    rewards = torch.tensor(right.reshape(2, 2), dtype=torch.float64)
    advantages = reinforce(rewards, rewards[..., None], torch.ones(1)).flatten()
    batch = weigh_positive(batch_of(advantages, lengths), weight)
    logs = torch.tensor(-RNG.random(batch.mask.shape), requires_grad=True)
    policy_loss(logs, batch.advantages, batch.mask, loss="grpo").backward()
    expected = np.zeros(batch.mask.shape)
    for row, n in enumerate(lengths):
        expected[row, :n] = (-weight if right[row] else 1.0) / n / len(lengths)
    assert logs.grad is not None
    np.testing.assert_allclose(logs.grad.numpy(), expected, rtol=1e-12)


def test_equal_groups_that_teach_are_not_replaced() -> None:
    with pytest.raises(ConfigError, match=r"equal rewards.*grpo\.advantage=leave_one_out"):
        make_plan(Draft.of(recipe("grpo.advantage=reinforce", "grpo.resample={when_below: 1}")))


def test_prompts_count_equally() -> None:
    lengths = [5, 1, 2, 7, 3, 3]
    batch = batch_of(torch.ones(6), lengths)
    values = torch.tensor(RNG.standard_normal(batch.mask.shape))
    means = mean_lengths(batch.mask.sum(1), 3)
    ours = (
        token_weights(batch.mask, "prompt-mean-token-mean", denominator=means, like=values) * values
    ).sum()
    array = values.numpy()
    prompts = [
        sum(array[row, : lengths[row]].sum() for row in rows) / sum(lengths[row] for row in rows)
        for rows in (range(3), range(3, 6))
    ]
    assert float(ours) == pytest.approx(np.mean(prompts), rel=1e-6)
    with pytest.raises(ValueError, match="mean_lengths"):
        token_weights(batch.mask, "prompt-mean-token-mean")


def test_steps_and_parts_of_a_rollout_batch_add_up_to_the_prompt_average(tmp_path: Path) -> None:
    """Two steps share a batch, groups torn apart, each step in parts: the sum is the float64 average over prompts."""
    rows = 8
    trainer = make_trainer(tmp_path, steps_per_generation=2, batch_size=4, group_size=4)
    lengths = [9, 2, 4, 1, 3, 3, 8, 5]
    batch = replace(batch_of(torch.randn(rows), lengths), prompts=[[5, 6], [7]])
    trainer.objective = replace(
        trainer.objective, loss=replace(LOSSES.get("dapo"), reduction="prompt-mean-token-mean")
    )
    trainer.passes.part_tokens = 12
    trainer.begin_rollout_batch(batch)
    assert len(trainer.dealt) == 2 and trainer.dealt[0] not in ([0, 1, 2, 3], [4, 5, 6, 7])
    trainer.model.zero_grad()
    for rows_of_step in trainer.dealt:
        in_parts(trainer, trainer.model, trainer.rollouts.take(rows_of_step))
    ours = torch.cat([p.grad.flatten() for p in trainer.model.parameters()]) / 2
    trainer.model.zero_grad()
    logs, _ = trainer.log_probs(trainer.model, batch)
    per_row = (logs.double() * batch.advantages).masked_fill(~batch.mask, 0).sum(1)
    prompts = [-per_row[r].sum() / sum(lengths[r]) for r in (slice(0, 4), slice(4, 8))]
    (sum(prompts) / 2).backward()  # type: ignore[union-attr]
    theirs = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "prompt-mean-token-mean"])
def test_groups_that_teach_nothing_can_be_left_out_of_the_mean(tmp_path: Path, reduction: Reduction) -> None:
    """With ``drop_equal_groups`` the gradient is that of the other group alone; without it that is halved, or weighed by tokens."""
    lengths, advantages = [9, 2, 4, 1, 3, 3, 8, 5], torch.tensor([1.0, -1, 0.5, -0.5, 0, 0, 0, 0])
    whole = replace(batch_of(advantages, lengths), prompts=[[5, 6], [7]])
    alone = Batch([[5, 6]], whole.completions[:4], [0] * 4, advantages[:4], whole.mask[:4])
    gradients = []
    for batch, drop in ((whole, True), (alone, False), (whole, False)):
        trainer = make_trainer(tmp_path, batch_size=len(batch), group_size=4)
        trainer.objective = replace(trainer.objective, loss=replace(LOSSES.get("dapo"), reduction=reduction))
        trainer.begin_rollout_batch(drop_equal_groups(batch, trainer, 4) if drop else batch)
        trainer.model.zero_grad()
        in_parts(trainer, trainer.model, trainer.share_of_step())
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 1e-5
    share = 16 / 35 if reduction == "token-mean" else 0.5
    assert float((gradients[2] - share * gradients[1]).norm() / gradients[1].norm()) < 1e-5


def off_policy(threshold: float) -> tuple[Batch, torch.Tensor, np.ndarray]:
    """Return a batch, log-probs of now, and which completions eq. 9 of DeepSeek-V3.2 leaves in, by hand."""
    lengths, advantages = [4, 2, 3, 4], np.array([-1.0, -1.0, 2.0, -0.5])
    now, drift = -RNG.random((4, 4)) - 0.5, np.array([0.7, 0.1, 0.9, 0.45])
    sampler = torch.tensor(now + drift[:, None] + 0.05 * RNG.standard_normal((4, 4)))
    sampler[0, 1] = NAN  # not scored: no evidence
    kept = []
    for row, n in enumerate(lengths):
        moved = np.nan_to_num(sampler.numpy()[row, :n] - now[row, :n]).mean()
        kept.append(advantages[row] >= 0 or moved <= threshold)
    batch = batch_of(torch.tensor(advantages), lengths, sampler_log_probs=sampler)
    return batch, torch.tensor(now, requires_grad=True), np.array(kept)


@pytest.mark.parametrize("threshold", [0.2, 0.5, 2.0])
def test_the_off_policy_mask_is_that_of_the_paper_and_of_trl(threshold: float) -> None:
    batch, now, kept = off_policy(threshold)
    assert batch.sampler_log_probs is not None
    arguments = (now, batch.sampler_log_probs, batch.advantages, batch.mask, threshold)
    assert on_policy_sequences(*arguments)[:, 0].tolist() == kept.tolist()
    theirs = GRPOTrainer.get_off_policy_mask(
        batch.advantages[:, :1], now, batch.sampler_log_probs, batch.mask.double(), threshold
    )
    assert theirs[:, 0].bool().tolist() == kept.tolist()


def test_masked_completions_have_no_gradient_and_are_counted() -> None:
    batch, now, kept = off_policy(0.5)
    assert kept.tolist() == [False, True, True, True] or not kept.all()
    metrics, objective = Metrics(), Objective(LOSSES.get("dapo"), group_centered)
    extensions = Extensions([Weights(recipe("grpo.off_policy_mask=0.5"))])
    weights = token_weights(batch.mask, "token-mean", like=now)
    loss_of(LossInputs(now, None, batch, weights, metrics), objective, extensions).backward()
    assert now.grad is not None
    assert ((now.grad != 0).any(1).numpy() == kept).all()
    expected = -(batch.advantages * weights).detach() * torch.tensor(kept)[:, None]
    torch.testing.assert_close(now.grad, expected.masked_fill(~batch.mask, 0.0))
    assert metrics.values()["off_policy_mask/masked"] == pytest.approx(1 - kept.mean())


def test_the_entropy_control_follows_the_target() -> None:
    entropies = [0.5, 0.19, 0.1, NAN, 0.2, 0.3, 0.3, 0.1]
    control = Weights(recipe("grpo.entropy_control={target: 0.2, step: 0.01, start: 0.005, most: 0.03}"))
    coefficient, bonus, used = 0.005, 0.0, []
    for entropy in entropies:
        used.append((control.entropy_bonus, bonus))
        control.seen(Event("gradient", values={"entropy": entropy}))
        if entropy == entropy:
            coefficient = min(max(coefficient + (0.01 if entropy <= 0.2 else -0.01), 0.0), 0.03)
            bonus = coefficient if entropy <= 0.2 else 0.0
    for ours, theirs in used:
        assert ours == pytest.approx(theirs, abs=1e-15)
    assert len({b for _, b in used}) > 3


@pytest.mark.slow
def test_a_run_with_all_of_them_continues_exactly(tmp_path: Path) -> None:
    own = (
        "sft.enabled=false",
        "grpo={group_size: 4, batch_size: 8, gradient_accumulation_steps: 1, num_iterations: 2, max_steps: 4, save_steps: 2, "
        "max_completion_tokens: 10, learning_rate: 0.01, lr_scheduler: constant, reduction: prompt-mean-token-mean, "
        "advantage: reinforce, positive_weight: 0.1, off_policy_mask: 0.0001, entropy_control: {target: 9, step: 0.01}}",
        "rewards=[random]",
    )
    recipes = [smoke_recipe(tmp_path, *own, f"run_name={name}") for name in ("whole", "again")]
    whole, again = (run_recipe(one, display=Quiet()).folder.path for one in recipes)
    shutil.rmtree(
        again / "grpo" / "final"
    )  # as a process leaves it that was killed after the checkpoint of step 2
    shutil.rmtree(again / "grpo" / "checkpoint-4")
    stages = json.loads((again / "stages.json").read_text())
    del stages["grpo"]
    (again / "stages.json").write_text(json.dumps(stages))
    run_recipe(recipes[1], display=Quiet(), resume=True)
    weights = [load_file(run / "grpo" / "final" / "model.safetensors") for run in (whole, again)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "entropy_control/bonus" in row]
    assert [row["entropy_control/bonus"] for row in rows] == pytest.approx([0, 0.01, 0.02, 0.03])
    assert max(row["off_policy_mask/masked"] for row in rows) > 0
