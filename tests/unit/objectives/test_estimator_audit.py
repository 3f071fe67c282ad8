"""What docs/estimators.md claims, and the enumeration behind it against a second one: ordered groups, gradients through the logits."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from algorist.objectives import advantage_named, mean_lengths, policy_loss
from algorist.objectives.losses import loss_named
from algorist.objectives.reductions import Reduction
from benchmarks.estimator_audit import (
    MOVED,
    NOW,
    POSITIVE_WEIGHT,
    RIGHT,
    START,
    SUM,
    audit,
    deviation_divided,
    expected_reward,
    logits_of,
    page,
    per_token_reward,
    same_on_policy,
    truncated_likelihood,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "estimators.md"
SIZES = (4, 8)


def log_probs(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of ``b``, ``aa``, ``ab`` by token, (problem, completion, token)."""
    b, a = torch.nn.functional.logsigmoid(logits), torch.nn.functional.logsigmoid(-logits)
    zero = torch.zeros(2, dtype=torch.float64)
    first, second = [b[:, 0], a[:, 0], a[:, 0]], [zero, b[:, 1], a[:, 1]]
    return torch.stack([torch.stack(first, 1), torch.stack(second, 1)], -1)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dapo", "cispo", "gspo"])
@pytest.mark.parametrize(
    ("advantage", "reduction"),
    [("leave_one_out", SUM), ("group_normalized", "token-mean"), ("maxrl", "prompt-mean-token-mean")],
)
@pytest.mark.parametrize("moved", [False, True], ids=["on policy", "off policy"])
def test_the_enumeration_is_that_of_all_ordered_groups(
    advantage: str, reduction: Reduction, loss: str, moved: bool
) -> None:
    size, policy = 2, MOVED if moved else NOW
    old = log_probs(torch.tensor(NOW.logits))
    chances = old.sum(-1).exp()
    expected = np.zeros((2, 2))
    for kinds in itertools.product(range(3), repeat=2 * size):
        problems = [0] * size + [1] * size
        chance = float(np.prod([chances[p, k] for p, k in zip(problems, kinds, strict=True)]))
        logits = torch.tensor(policy.logits, requires_grad=True)
        rows, before = log_probs(logits)[problems, list(kinds)], old[problems, list(kinds)]
        mask = torch.tensor([[True, kind > 0] for kind in kinds])
        rewards = torch.tensor([RIGHT[p, k] for p, k in zip(problems, kinds, strict=True)]).view(2, size)
        denominator = mean_lengths(mask.sum(1), size) if reduction == "prompt-mean-token-mean" else None
        entry = replace(loss_named(loss), reduction=reduction)
        advantages = advantage_named(advantage)(rewards).flatten()
        value = policy_loss(
            rows,
            advantages,
            mask,
            loss=entry,
            denominator=denominator,
            old_log_probs=before if moved else None,
        )
        value.backward()
        assert logits.grad is not None
        expected -= chance * logits.grad.numpy()
    ours = audit(advantage, reduction, size, loss, policy, NOW).mean
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12)


def test_the_gradient_of_the_pass_rate_is_that_of_a_difference() -> None:
    def rate(logits: np.ndarray) -> float:
        return float((log_probs(torch.tensor(logits)).sum(-1).exp().numpy() * RIGHT).sum() / 2)

    for policy in (NOW, MOVED):
        for place in itertools.product(range(2), repeat=2):
            step = np.zeros((2, 2))
            step[place] = 1e-5
            slope = (rate(policy.logits + step) - rate(policy.logits - step)) / 2e-5
            assert expected_reward(policy)[place] == pytest.approx(slope, abs=1e-9)
    np.testing.assert_allclose(NOW.logits, logits_of(START))
    np.testing.assert_allclose(NOW.pass_rates, [0.1, 0.6])


@pytest.mark.parametrize("size", SIZES)
def test_unbiased_estimators_are_the_gradient_of_the_pass_rate(size: int) -> None:
    """RLOO as it is, Dr. GRPO up to (G - 1) / G and the longest completion, ±1 up to 2, with weight λ up to 1 + λ."""
    longest: Reduction = "seq-mean-token-sum-norm"
    for advantage, reduction, factor in (
        ("leave_one_out", SUM, 1.0),
        ("group_centered", longest, (size - 1) / size / 2),
        ("reinforce", SUM, 2.0),
        ("w_reinforce", SUM, 1 + POSITIVE_WEIGHT),
    ):
        np.testing.assert_allclose(
            audit(advantage, reduction, size).mean, factor * expected_reward(), rtol=1e-9, atol=1e-15
        )


@pytest.mark.parametrize("size", SIZES)
def test_biased_ones_are_the_gradients_of_what_is_said(size: int) -> None:
    grpo, maxrl = audit("group_normalized", SUM, size), audit("maxrl", SUM, size)
    np.testing.assert_allclose(grpo.mean, deviation_divided(size), rtol=1e-9)
    assert grpo.angle(expected_reward()) > 0.5, (
        "GRPO's division by the deviation is no gradient of the pass rate"
    )
    p = NOW.pass_rates[:, None]
    np.testing.assert_allclose(maxrl.mean, truncated_likelihood(size - 1), rtol=1e-9)
    np.testing.assert_allclose(maxrl.mean, expected_reward() * (1 - (1 - p) ** (size - 1)) / p, rtol=1e-9)
    short = audit("leave_one_out", "seq-mean-token-mean", size)
    np.testing.assert_allclose(short.mean, per_token_reward(), rtol=1e-9, atol=1e-15)
    assert short.angle(expected_reward()) > 5


@pytest.mark.slow
def test_losses_differ_off_policy_only() -> None:
    assert same_on_policy(4) < 1e-12
    moved = {
        name: audit("leave_one_out", SUM, 4, name, MOVED, NOW).angle(expected_reward(MOVED))
        for name in ("dapo", "cispo")
    }
    assert moved["dapo"] > moved["cispo"] + 5 > 5


def test_the_page_has_the_numbers_of_the_audit() -> None:
    """The column G = 4 of every row; ``test_the_page_is_written_by_the_command`` compares the rest."""
    first = re.compile(r"(?<=\| )([^|/]+?) / [^|]* \| ([0-9.]+) / [^|]* \|$")
    rows = [
        first.sub(r"\1 | \2 |", line)
        for line in PAGE.read_text(encoding="utf-8").split("\n")
        if first.search(line)
    ]
    assert len(rows) == 31
    ours = set(page([4]).split("\n"))
    assert [row for row in rows if row not in ours] == []


@pytest.mark.long
@pytest.mark.slow
def test_the_page_is_written_by_the_command() -> None:
    assert PAGE.read_text(encoding="utf-8") == page([4, 16])
