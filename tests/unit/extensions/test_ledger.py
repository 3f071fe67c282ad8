"""The ledger's quantities are what an independent float64 computation gives, planted terms come back, and training is not changed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from algorist.config.schema import Recipe
from algorist.extensions import ledger
from algorist.extensions.ledger.gradient import CORRECT, numbers_of
from algorist.extensions.ledger.shares import mean_advantages, reward_sums, token_sums
from algorist.extensions.ledger.weights import Sample, length
from algorist.extensions.reference import KLPenalty
from algorist.objectives.advantages import advantage_named
from algorist.runs.pipeline import run_recipe
from algorist.training.extension import Event, Extensions
from algorist.types import Group, Problem, Rollout, Turn
from algorist_grader.types import Grade, Parsed
from tests.tiny import make_model, make_trainer, parameters_of, smoke_recipe

WEIGHTS = {"correct": 1.0, "long": -0.5, "unused": 0.0}


def made(seed: int, groups: int = 6, size: int = 5) -> list[Group]:
    """Make up groups whose rewards and lengths are drawn at random; some completions are cut, unread, or called a tool."""
    rng = numpy.random.default_rng(seed)
    batch = []
    for index in range(groups):
        rollouts = []
        for _ in range(size):
            count = int(rng.integers(3, 9))
            values = {
                "correct": float(rng.integers(2)),
                "long": float(rng.normal()),
                "unused": float(rng.normal()),
            }
            reason = "equal_string" if values["correct"] else str(rng.choice(["no_answer", "different"]))
            sampled = [place != 2 for place in range(count)] if rng.random() < 0.3 else None
            rollouts.append(
                Rollout(
                    list(range(count)), "", None, bool(rng.random() < 0.3), Parsed(None, None, False),
                    Grade(bool(values["correct"]), reason, None, "1"), values,
                    sum(WEIGHTS[name] * value for name, value in values.items()), sampled,
                    (Turn("python", "1", "1"),) if sampled else (),
                )
            )  # fmt: skip
        batch.append(Group(Problem(f"p{index}", "?", "1"), "", [1], rollouts))
    return batch


def arrays(groups: list[Group]) -> dict[str, Any]:
    """Return the numbers of groups as float64 arrays (P, G)."""
    every = [group.rollouts for group in groups]
    named = {name: numpy.array([[r.rewards[name] for r in row] for row in every]) for name in WEIGHTS}
    return named | {"reward": numpy.array([[r.reward for r in row] for row in every])}


@pytest.mark.parametrize("name", ["group_normalized", "leave_one_out", "reinforce_plus_plus_baseline"])
def test_shares_of_rewards_are_those_of_float64(name: str) -> None:
    groups = made(1)
    values = arrays(groups)
    advantages = advantage_named(name)(torch.tensor(values["reward"], dtype=torch.float32))
    shares, agree = reward_sums(groups, WEIGHTS, advantages)
    a = advantages.double().numpy()

    def centred(x: Any) -> Any:
        return x - x.mean(1, keepdims=True)

    whole = (a * centred(values["reward"])).sum()
    for reward, weight in WEIGHTS.items():
        above, below = shares[reward]
        assert above / below == pytest.approx((a * weight * centred(values[reward])).sum() / whole, abs=1e-9)
    assert sum(above / below for above, below in shares.values()) == pytest.approx(1)
    for key, x in (("advantage", a), ("reward", values["reward"])):
        expected = numpy.corrcoef(centred(x).ravel(), centred(values["correct"]).ravel())[0, 1]
        assert agree[key] == pytest.approx(expected, abs=1e-9)


def test_a_flipped_sign_and_a_drowned_reward_are_numbers() -> None:
    groups = made(2, groups=40)
    rewards = torch.tensor(arrays(groups)["correct"])
    paid = [
        Group(g.problem, "", [1], [_paid(r, r.rewards["correct"] or 0.0) for r in g.rollouts]) for g in groups
    ]
    shares, agree = reward_sums(paid, {"correct": 1.0}, -advantage_named("group_centered")(rewards))
    assert shares["correct"][0] / shares["correct"][1] == pytest.approx(1)
    assert agree["advantage"] == pytest.approx(-1) and agree["reward"] == pytest.approx(1)
    weights = {"correct": 0.05, "long": 5.0}
    mixed = [
        Group(g.problem, "", [1], [_paid(r, sum(w * (r.rewards[n] or 0) for n, w in weights.items())) for r in g.rollouts])
        for g in groups
    ]  # fmt: skip
    total = torch.tensor([[r.reward for r in g.rollouts] for g in mixed])
    shares, agree = reward_sums(mixed, weights, advantage_named("group_normalized")(total))
    assert shares["correct"][0] / shares["correct"][1] < 0.02 and abs(agree["advantage"]) < 0.2


def _paid(rollout: Rollout, reward: float) -> Rollout:
    return Rollout(**{**{n: getattr(rollout, n) for n in rollout.__dataclass_fields__}, "reward": reward})


def test_advantages_that_no_reward_made_have_no_shares() -> None:
    groups = made(3)
    same = [Group(g.problem, "", [1], [_paid(r, 0.0) for r in g.rollouts]) for g in groups]
    assert reward_sums(same, {"correct": 0.0}, torch.randn(6, 5))[0] == {}


def test_mass_on_tokens_is_that_of_float64() -> None:
    rollouts = [rollout for group in made(4) for rollout in group.rollouts]
    width = max(len(r.completion_ids) for r in rollouts)
    mask = torch.zeros(len(rollouts), width, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        mask[row, : len(rollout.completion_ids)] = torch.tensor(rollout.sampled_mask)
    advantages = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    mass = numpy.abs(advantages.double().numpy()) * mask.numpy()
    expected = dict.fromkeys(("first", "last", "truncated", "unread", "before_reply"), 0.0)
    for row, rollout in enumerate(rollouts):
        inside = [place for place, sampled in enumerate(rollout.sampled_mask) if sampled]
        expected["first"] += mass[row, inside[0]]
        expected["last"] += mass[row, inside[-1]]
        expected["truncated"] += mass[row].sum() * rollout.truncated
        expected["unread"] += mass[row].sum() * (
            rollout.grade is not None and rollout.grade.reason == "no_answer"
        )
        expected["before_reply"] += mass[row, :2].sum() * (rollout.sampled is not None)
    sums = token_sums(rollouts, advantages, mask)
    assert sums.pop("counted") == (mask.sum(), mask.sum())
    mine = mask & (mask.cumsum(1) > 1)  # as a plugin leaves tokens out
    assert token_sums(rollouts, advantages, mine)["counted"] == (mine.sum(), mask.sum())
    assert {n: s / w for n, (s, w) in sums.items()} == pytest.approx(
        {n: v / mass.sum() for n, v in expected.items()}
    )
    assert token_sums(rollouts, advantages * 0, mask) == {}
    means = mean_advantages(advantages, mask)
    assert float(means[0]) == pytest.approx(float(advantages[0][mask[0]].double().mean()))


def stepped(folder: Path, **settings: Any) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """Train three steps with the ledger and return its lines and the weights before and after each step."""
    trainer = make_trainer(
        folder, extensions=Extensions([ledger.BeforeOthers(None), ledger.Ledger(None)]), **settings
    )
    trainer.extensions.seen(Event("stage", "grpo", trainer=trainer))
    states = [parameters_of(trainer).clone()]

    from transformers import TrainerCallback

    class Keep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            states.append(parameters_of(trainer).clone())

    trainer.add_callback(Keep())
    trainer.train()
    lines = [line for line in trainer.state.log_history if "ledger/step/length" in line]
    return lines, states


@pytest.mark.slow
def test_a_step_is_told_apart_into_decay_and_gradient(tmp_path: Path) -> None:
    """Planted: a decay of known size, and a norm that cuts the gradient by a known factor."""
    lines, states = stepped(tmp_path, weight_decay=2.0, max_grad_norm=1e-3)
    assert len(lines) == 3
    rates = [1e-2, 1e-2 * 2 / 3, 1e-2 / 3]
    shapes = [p for p in make_model().parameters() if p.requires_grad]
    decayed = torch.cat(
        [torch.full((p.numel(),), float(p.dim() > 1)) for p in shapes]
    )  # not of norms and biases
    for line, before, after, rate in zip(lines, states[:-1], states[1:], rates, strict=True):
        size = before.double().norm()
        assert line["ledger/step/length"] == pytest.approx(
            float((after - before).double().norm() / size), rel=1e-5
        )
        pull = rate * 2.0 * before * decayed
        assert line["ledger/step/decay"] == pytest.approx(float(pull.double().norm() / size), rel=1e-5)
        rest = (after - before + pull).double().norm() / size
        assert line["ledger/step/gradient"] == pytest.approx(float(rest), rel=1e-3)
        assert line["ledger/step/clipped"] == pytest.approx(1e-3 / line["grad_norm"], rel=1e-3)
        assert line["ledger/step/schedule"] == pytest.approx(rate / 1e-2)
        assert line["ledger/reward/reward_digits"] + line["ledger/reward/reward_length"] == pytest.approx(1)


@pytest.mark.slow
def test_a_decay_inside_the_gradient_is_not_told_apart(tmp_path: Path) -> None:
    lines, _ = stepped(tmp_path, weight_decay=0.1, optim="sgd")
    assert all("ledger/step/length" in line and "ledger/step/decay" not in line for line in lines)


def test_a_sample_of_large_weights_estimates_their_length() -> None:
    weights = [torch.nn.Parameter(torch.randn(300, 500)), torch.nn.Parameter(3 * torch.randn(900))]
    sample = Sample(weights, elements=20_000)
    taken = sample.take(lambda p: p)
    assert taken is not None and len(taken) == 20_000
    share = 20_000 / (300 * 500 + 900)
    assert length(taken) == pytest.approx(
        length(torch.cat([w.detach().flatten() for w in weights])) * math.sqrt(share), rel=0.03
    )
    assert sample.take(lambda p: p.grad) is None


@pytest.mark.slow
def test_the_ledger_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights to the bit and the same other metrics, with and without it, where a penalty and a bonus are minimised too."""
    changes = (
        "grpo.beta=0.05", "grpo.entropy_bonus=0.01", "grpo.num_iterations=2", "sft.max_steps=2", "grpo.ledger_every=1",
    )  # fmt: skip
    rows = {}
    for name in ("with", "without"):
        if name == "without":
            monkeypatch.setattr(ledger._Always, "takes_part", classmethod(lambda cls, recipe: False))
        run = run_recipe(
            smoke_recipe(
                tmp_path, f"run_name={name}", "rewards=[{name: well_formed}, {name: correct}]", *changes
            )
        )
        weights = (run.folder.path / "grpo/final/model.safetensors").read_bytes()
        lines = map(json.loads, (run.folder.path / "metrics.jsonl").read_text().splitlines())
        rows[name] = weights, [
            {k: v for k, v in line.items() if not k.startswith(("time", "hardware/", "ledger/", "rollout/"))} for line in lines
        ]  # fmt: skip
    assert rows["with"] == rows["without"]


@pytest.mark.slow
def test_terms_of_the_gradient_add_up_to_what_training_computes(tmp_path: Path) -> None:
    """An entropy bonus and a penalty of known weight: doubled weights double their part, and all parts are the step's gradient."""
    shares = {}
    for name, beta, bonus in (("once", 0.5, 0.1), ("twice", 1.0, 0.1)):
        recipe = Recipe.model_validate({"grpo": {"beta": beta, "entropy_bonus": bonus, "ledger_every": 1}})
        parts = [ledger.BeforeOthers(recipe), KLPenalty(recipe), ledger.Ledger(recipe)]
        trainer = make_trainer(
            tmp_path / name, extensions=Extensions(parts), max_steps=2, beta=beta, entropy_bonus=bonus, num_iterations=2,
        )  # fmt: skip
        trainer.extensions.seen(Event("stage", "grpo", trainer=trainer))
        trainer.train()
        lines = [line for line in trainer.state.log_history if "ledger/gradient/share/rewards" in line]
        shares[name] = lines
        for line in lines:
            own = {k.rpartition("/")[2]: v for k, v in line.items() if k.startswith("ledger/gradient/share/")}
            assert set(own) == {"rewards", "reference", "entropy"} and sum(own.values()) == pytest.approx(1)
    first, doubled = (shares[name][0] for name in ("once", "twice"))
    for term in ("rewards", "entropy"):  # the first step has the same policy
        assert doubled[f"ledger/gradient/norm/{term}"] == pytest.approx(first[f"ledger/gradient/norm/{term}"])
    second, doubled = (shares[name][-1] for name in ("once", "twice"))
    assert second["ledger/gradient/norm/reference"] > 0 < doubled["ledger/gradient/norm/reference"]


def test_shares_and_cosine_of_planted_gradients() -> None:
    rewards, kl = torch.tensor([3.0, 0.0, 0.0]).double(), torch.tensor([1.0, 1.0, 0.0]).double()
    values = numbers_of(
        {"rewards": rewards, "reference": kl, CORRECT: torch.tensor([0.0, 2.0, 0.0]).double()}
    )
    assert values["share/rewards"] == pytest.approx(12 / 17) and values["share/reference"] == pytest.approx(
        5 / 17
    )
    assert values["cosine"] == pytest.approx(1 / math.sqrt(17)) and values["norm/reference"] == pytest.approx(
        math.sqrt(2)
    )
    assert numbers_of({"rewards": rewards}) == {}


@pytest.mark.slow
def test_a_gradient_that_cannot_be_told_apart_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(KLPenalty):
        """Runs out of memory in the ledger's pass, which comes before the update's."""

        calls = 0

        def loss(self, part: Any) -> None:
            self.calls += 1
            if self.calls == 2:  # the first step is not measured
                raise MemoryError("no room")
            super().loss(part)

    Full.__module__ = "algorist.extensions.reference"
    recipe = Recipe.model_validate({"grpo": {"beta": 0.5, "entropy_bonus": 0.1, "ledger_every": 2}})
    parts = [ledger.BeforeOthers(recipe), Full(recipe), ledger.Ledger(recipe)]
    trainer = make_trainer(tmp_path, extensions=Extensions(parts), beta=0.5, entropy_bonus=0.1)
    trainer.extensions.seen(Event("stage", "grpo", trainer=trainer))
    trainer.train()
    assert trainer.state.global_step == 3
    assert "the gradient is not told apart by term: no memory is left for it" in caplog.text
