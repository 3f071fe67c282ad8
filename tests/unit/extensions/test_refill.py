"""Dynamic sampling: unbiased, limited, stored whole. Resume: ``test_checkpoint``; two processes and kills: ``tests/slow``."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from algorist.config.schema import Recipe
from algorist.extensions.pools import Pools
from algorist.extensions.resample import ResampleSection, refill
from algorist.objectives import group_normalized, useful_groups
from algorist.training import step
from algorist.training.extension import Sampled
from algorist.training.order import Reserve
from algorist.types import Grade, Group, Parsed, Problem, Rollout
from tests.tiny import make_model, make_trainer, parameters_of, rewards_of

SIZE, ARMS, PLACES, DRAWS = 4, 3, 8, 25_000


@dataclass
class Draw:
    """A group of a bandit: which problem, and which of the ARMS ** SIZE outcomes."""

    problem: int
    outcome: int
    seconds: float = 0.0


@pytest.mark.slow
def test_the_expected_update_is_that_of_the_useful_groups() -> None:
    """Bandits with known gradients: 25,000 places, three standard errors, against every outcome counted out in float64."""
    generator = torch.Generator().manual_seed(5)
    features_QAF = torch.randn(5, ARMS, 3, generator=generator, dtype=torch.float64)
    theta_F = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
    rewards_QA = torch.tensor([[0, 0, 1], [0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 0, 0.5]], dtype=torch.float64)
    scores_QA = 3 * features_QAF @ theta_F
    pi_QA = scores_QA.softmax(-1)
    slope_QAF = 3 * (features_QAF - (pi_QA[..., None] * features_QAF).sum(1, keepdim=True))  # of log π
    outcomes_OG = torch.tensor(list(itertools.product(range(ARMS), repeat=SIZE)))
    chance_QO = pi_QA[:, outcomes_OG].prod(-1)
    rewards_QOG = rewards_QA[:, outcomes_OG]
    advantages_QOG = group_normalized(rewards_QOG.reshape(-1, SIZE)).view_as(rewards_QOG)
    gradient_QOF = (advantages_QOG[..., None] * slope_QAF[:, outcomes_OG]).mean(2)
    useful_QO = useful_groups(rewards_QOG.reshape(-1, SIZE)).view(5, -1)
    share = float((chance_QO * useful_QO).sum() / 5)
    stated_F = (chance_QO * useful_QO)[..., None].mul(gradient_QOF).sum((0, 1)) / 5 / share
    assert 0.2 < share < 0.5 and stated_F.norm() > 0.1

    def draw(number: int) -> list[Any]:
        problems = torch.randint(5, (number,), generator=generator)
        found = torch.multinomial(chance_QO[problems], 1, generator=generator)[:, 0]
        return [Draw(q, o) for q, o in zip(problems.tolist(), found.tolist(), strict=True)]

    def useful(groups: Any) -> list[bool]:
        return [bool(table[g.problem][g.outcome]) for g in groups]

    table = useful_QO.tolist()
    limits = ResampleSection(when_below=1, max_rounds=100, max_share=1000)
    places: list[Any] = []
    bare: list[Any] = []
    some: list[
        Any
    ] = []  # useful groups where only the worse batches are filled: still draws of the same kind
    while len(places) < DRAWS:
        first = draw(PLACES)
        filled, partly = Sampled([], list(first)), Sampled([], list(first))
        refill(filled, draw, useful, limits)
        assert all(useful(filled.groups)) and len(filled.groups) == PLACES
        places += filled.groups
        bare += first
        refill(partly, draw, useful, limits.model_copy(update={"when_below": 0.5}))
        enough = sum(useful(first)) >= PLACES / 2
        assert partly.groups == first if enough else all(useful(partly.groups))
        some += [group for group, good in zip(partly.groups, useful(partly.groups), strict=True) if good]
    assert DRAWS / 2 < len(some) < len(places)
    for groups, expected_F in ((places, stated_F), (bare, stated_F * share), (some, stated_F)):
        index = torch.tensor([(g.problem, g.outcome) for g in groups])
        found_NF = gradient_QOF[index[:, 0], index[:, 1]]
        error_F = found_NF.std(0) / math.sqrt(len(groups))
        assert ((found_NF.mean(0) - expected_F).abs() < 3 * error_F).all()


def test_the_reserve_is_every_problem_once_a_turn_and_stands_in_one_number() -> None:
    problems = [Problem(str(n), f"{n}?", "0") for n in range(10)]
    reserve = Reserve(problems, seed=3)
    taken = {"2", "5"}
    first = reserve.draw(5, without=taken)
    second = Reserve(problems, seed=3)
    second.position = reserve.position
    assert not taken & {p.id for p in first} and len({p.id for p in first}) == 5
    assert second.draw(3, without=set()) == reserve.draw(3, without=set())
    assert len(reserve.draw(100, without=taken)) == 8  # no more than there are
    assert reserve.draw(1, without={p.id for p in problems}) == []


def rare(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 for few completions, so that most groups are equal."""
    return [float(sum(ids) % 13 == 0) for ids in completion_ids]


def never(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The same for all."""
    return [0.5 for _ in completion_ids]


MANY = [Problem(f"q{n}", f"{n}+{n % 7}", str(n)) for n in range(60)]


def train(folder: Path, **settings: Any) -> tuple[Any, list[tuple[int, list[Group], torch.Tensor]]]:
    batches: list[tuple[int, list[Group], torch.Tensor]] = []
    given = {"problems": MANY, "learning_rate": 1e-4, **settings}
    trainer = make_trainer(folder, on_rollouts=lambda *b: batches.append(b), **given)
    trainer.train()
    return trainer, batches


@pytest.mark.slow
def test_batches_with_enough_useful_groups_stay_as_they_are(tmp_path: Path) -> None:
    rounds = []
    for name, share in (("a", 1.0), ("b", 0.25)):
        limits = {"when_below": share, "max_rounds": 8, "max_share": 20}
        trainer, _ = train(tmp_path / name, rewards=rewards_of(rare), resample=limits, batch_size=16)
        lines = [line for line in trainer.state.log_history if "groups/sampled" in line]
        rounds.append([line["groups/refill_rounds"] for line in lines])
        shares = [line["groups/trained_useful_share"] for line in lines]
    assert all(rounds[0]) and 0 < rounds[1].count(0) < 3, rounds
    assert [0.25 <= share < 1 for share in shares] == [number == 0 for number in rounds[1]], (shares, rounds)


@pytest.mark.slow
def test_useless_groups_are_replaced_and_every_sampled_group_is_handed_on(tmp_path: Path) -> None:
    trainer, batches = train(
        tmp_path,
        rewards=rewards_of(rare),
        resample={"when_below": 1, "max_rounds": 8, "max_share": 20},
        batch_size=16,
    )
    logs = [line for line in trainer.state.log_history if "groups/sampled" in line]
    assert len(batches) == len(logs) == 3
    for (_, groups, advantages_PG), line in zip(batches, logs, strict=True):
        assert line["groups/trained_useful_share"] == 1.0 > line["groups/useful_share"]
        assert line["groups/sampled"] == len(groups) == len(advantages_PG) > 4
        assert len({group.problem.id for group in groups}) == len(groups)
        useful = [len({r.reward for r in group.rollouts}) > 1 for group in groups]
        assert all(useful[:4]) and advantages_PG[:4].abs().sum(1).min() > 0
        assert advantages_PG[4:].isnan().all() and not advantages_PG[:4].isnan().any()
        assert line["groups/useful_share"] == pytest.approx(sum(useful) / len(useful))
        assert line["num_tokens"] > 0


def test_groups_of_equal_rewards_count_as_useful_where_they_teach(tmp_path: Path) -> None:
    for advantage, share in (("reinforce", 1.0), ("group_normalized", 0.0)):
        trainer, _ = train(tmp_path / advantage, rewards=rewards_of(never), max_steps=1, advantage=advantage)
        line = next(line for line in trainer.state.log_history if "groups/useful_share" in line)
        assert line["groups/useful_share"] == share and (line["grad_norm"] > 0) == bool(share), advantage


@pytest.mark.slow
@pytest.mark.long
def test_without_any_signal_it_ends_at_the_limits(tmp_path: Path) -> None:
    _, batches = train(tmp_path / "a", rewards=rewards_of(never), resample={"max_share": 2.5}, max_steps=1)
    assert len(batches[0][1]) == 2 + 5
    trainer, batches = train(
        tmp_path / "b", rewards=rewards_of(never), resample={"max_rounds": 1, "max_share": 100}, max_steps=1
    )
    assert trainer.state.log_history[0]["groups/refill_rounds"] == 1
    _, batches = train(
        tmp_path / "c", rewards=rewards_of(never), resample={"max_rounds": 9, "max_share": 500}, max_steps=1
    )
    assert len(batches[0][1]) == len(MANY)  # each problem once


@pytest.mark.slow
def test_single_rewards_reach_the_advantage_and_decide_what_is_useful(tmp_path: Path) -> None:
    """Two rewards that cancel in the sum: no signal in the sum, all of it in the parts."""

    def up(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 5) for ids in completion_ids]

    def down(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [-float(sum(ids) % 5) for ids in completion_ids]

    cancels = rewards_of(up, down)
    _, batches = train(tmp_path / "a", rewards=cancels, resample={}, max_steps=1)
    assert not batches[0][2][:2].any() and len(batches[0][1]) == 2 + 6
    settings = {"advantage": "per_reward_normalized", "resample": {}, "max_steps": 1}
    _, batches = train(tmp_path / "b", rewards=cancels, **settings)
    assert len(batches[0][1]) < 8  # hardly a group without a signal


@pytest.mark.slow
def test_the_entropy_bonus_moves_the_policy_along_the_gradient_of_its_entropy(tmp_path: Path) -> None:
    """What the bonus adds to a plain gradient step is c · ∇(mean entropy per token), computed from the model's own logits."""
    moved, coefficient, rate = [], 0.3, 0.5
    kept: list[Any] = []
    for bonus in (0.0, coefficient):
        model = make_model()
        trainer = make_trainer(
            tmp_path, model, rewards=rewards_of(rare), optim="sgd", learning_rate=rate, max_grad_norm=1e9,
            max_steps=1, entropy_bonus=bonus, on_rollouts=lambda *b: kept.append(b),
        )  # fmt: skip
        before = parameters_of(trainer)
        trainer.train()
        moved.append(parameters_of(trainer) - before)
    model = make_model().double().eval()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for group in kept[0][1]:
        for rollout in group.rollouts:
            ids = torch.tensor([group.prompt_ids + rollout.completion_ids])
            logits = model(ids).logits[0, len(group.prompt_ids) - 1 : -1]
            total = total + torch.distributions.Categorical(logits=logits).entropy().sum()
            tokens += len(rollout.completion_ids)
    gradient = torch.autograd.grad(total / tokens, [p for p in model.parameters() if p.requires_grad])
    expected = rate * coefficient * torch.cat([g.flatten() for g in gradient]).float()
    difference = moved[1] - moved[0]
    assert expected.norm() > 1e-2
    assert float((difference - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.slow
def test_replayed_groups_keep_the_log_probs_of_the_policy_that_sampled_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[Any] = []
    trainer = make_trainer(
        tmp_path, problems=MANY, rewards=rewards_of(rare), replay={"max_age": 3}, max_steps=12,
        on_rollouts=lambda *b: batches.append(b),
    )  # fmt: skip
    used: list[Any] = []
    compute = step.with_old_log_probs

    def spy(trainer: Any, batch: Any, earlier: Any) -> Any:
        used.append((list(earlier), compute(trainer, batch, earlier)))
        return used[-1][1]

    monkeypatch.setattr(step, "with_old_log_probs", spy)
    trainer.train()
    seen = {
        (tuple(group.prompt_ids), tuple(rollout.completion_ids)): (number, rollout)
        for number, (_, groups, _) in enumerate(batches)
        for group in groups
        for rollout in group.rollouts
    }
    replays = [(number, place, batch) for number, (places, batch) in enumerate(used) for place in places]
    assert replays and len({tuple(b.prompts[place]) for _, place, b in replays}) == len(replays), "each once"
    for number, place, batch in replays:
        rows = [row for row, prompt in enumerate(batch.prompt_of) if prompt == place]
        for row in rows:
            made, rollout = seen[tuple(batch.prompts[place]), tuple(batch.completions[row])]
            assert 1 <= number - made <= 3
            length = len(rollout.completion_ids)
            assert batch.old_log_probs[row, :length].tolist() == pytest.approx(rollout.log_probs)
            assert batch.sampler_log_probs[row, :length].isnan().all()
        assert batch.advantages[rows].abs().sum() > 0
    logged = sum(line.get("groups/replayed", 0) for line in trainer.state.log_history)
    assert logged == len(replays)


@pytest.mark.slow
def test_problems_that_no_completion_solves_rest(tmp_path: Path) -> None:
    def least_distance(**settings: Any) -> int:
        _, batches = train(tmp_path, rewards=rewards_of(rare), max_steps=14, **settings)
        last: dict[str, int] = {}
        gaps = []
        for number, (_, groups, _) in enumerate(batches):
            for group in groups:
                gaps.append(number - last.get(group.problem.id, -99))
                last[group.problem.id] = number
        return min(gaps)

    few = {"problems": MANY[:20]}
    assert least_distance(**few) <= 3 < least_distance(**few, pools={"hopeless": 3})


def test_rests_double_and_end() -> None:
    def group(right: list[bool]) -> Group:
        grades = [Grade(value, "different", None, "") for value in right]
        parsed = Parsed(None, None, False)
        return Group(MANY[0], "", [], [Rollout([1], "", None, False, parsed, grade) for grade in grades])

    def awake_after(pools: Pools) -> int:
        for waited in range(100):
            if not pools.resting():
                return waited
            pools.judge([])
        raise AssertionError("never")

    pools = Pools(Recipe.model_validate({"grpo": {"pools": {"solved": 2, "hopeless": 3}}}))
    for right, rest in (
        ([True, True], 2),
        ([True, True], 4),
        ([False, False], 3),
        ([True, False], 0),
        ([True, True], 2),
    ):
        pools.judge([group(right)])
        again = Pools(pools.recipe)
        again.load_state_dict(pools.state_dict())
        assert awake_after(again) == awake_after(pools) == rest
