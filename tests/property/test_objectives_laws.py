"""Laws: padding, micro-batching and shifted rewards change nothing; on-policy, every loss is REINFORCE."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algorist.extensions.toolkit import grpo_microbatch_train_step, sft_microbatch_train_step
from algorist.objectives import group_centered, group_normalized, leave_one_out, masked_mean, policy_loss

KINDS = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo", "sapo", "luspo", "vespo"]
SEEDS = st.integers(0, 2**31 - 1)


def batch(seed: int, rows: int = 4, width: int = 6) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, width + 1, (rows,), generator=g)
    log_probs = -3 * torch.rand(rows, width, generator=g, dtype=torch.float64)
    return {
        "log_probs": log_probs,
        "old": log_probs + 0.4 * torch.randn(rows, width, generator=g, dtype=torch.float64),
        "ref": log_probs + 0.4 * torch.randn(rows, width, generator=g, dtype=torch.float64),
        "advantages": torch.randn(rows, generator=g, dtype=torch.float64),
        "mask": torch.arange(width) < lengths[:, None],
    }


def run(b: dict[str, Tensor], kind: str, **extra: Any) -> tuple[float, Tensor]:
    log_probs = b["log_probs"].clone().requires_grad_()
    loss = policy_loss(
        log_probs,
        b["advantages"],
        b["mask"],
        loss=kind,
        **{"old_log_probs": b["old"], "ref_log_probs": b["ref"], "beta": 0.05, "denominator": 11.0, **extra},
    )
    loss.backward()
    assert log_probs.grad is not None
    return float(loss.detach()), log_probs.grad


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, wider=st.integers(1, 4), filling=st.sampled_from([0.0, -1e30, math.nan, math.inf]))
def test_padding_changes_nothing(kind: str, seed: int, wider: int, filling: float) -> None:
    b = batch(seed)
    outside = torch.full((4, wider), filling, dtype=torch.float64)
    padded = {k: torch.cat([b[k], outside], 1) for k in ("log_probs", "old", "ref")}
    padded |= {"advantages": b["advantages"], "mask": torch.nn.functional.pad(b["mask"], (0, wider))}
    (value, gradient), (value_padded, gradient_padded) = run(b, kind), run(padded, kind)
    assert value == pytest.approx(value_padded, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(gradient_padded[:, :6], gradient)
    assert not gradient_padded[:, 6:].any()


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "bnpo"])
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_micro_batching_changes_nothing(kind: str, seed: int) -> None:
    b = batch(seed, rows=6)
    value, gradient = run(b, kind)
    parts = [run({k: v[i : i + 2] for k, v in b.items()}, kind) for i in (0, 2, 4)]
    share = 1.0 if kind in ("dapo", "cispo", "vespo") else 1 / 3
    assert value == pytest.approx(sum(p[0] for p in parts) * share, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(gradient, torch.cat([p[1] for p in parts]) * share)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS)
def test_micro_batch_steps_add_up(seed: int) -> None:
    b = batch(seed, rows=6)
    for step in (
        lambda x, lp, n: sft_microbatch_train_step(lp, x["mask"], n, 2.0),
        lambda x, lp, n: grpo_microbatch_train_step(
            lp, x["mask"], n, "grpo_clip", None, x["advantages"], x["old"], 0.2
        ),
    ):
        whole = b["log_probs"].clone().requires_grad_()
        split = b["log_probs"].clone().requires_grad_()
        value = step(b, whole, 1)[0]
        total = sum(step({k: v[i : i + 3] for k, v in b.items()}, split[i : i + 3], 2)[0] for i in (0, 3))
        torch.testing.assert_close(value, total)
        torch.testing.assert_close(whole.grad, split.grad)


@settings(max_examples=60, deadline=None)
@given(
    rewards=st.lists(st.floats(-4, 4, width=32), min_size=12, max_size=12),
    shifts=st.lists(st.integers(-8, 8), min_size=3, max_size=3),
)
def test_shifting_all_rewards_of_a_group_changes_nothing(rewards: list[float], shifts: list[int]) -> None:
    values = torch.tensor(rewards, dtype=torch.float64).view(3, 4)
    shifted = values + torch.tensor(shifts, dtype=torch.float64)[:, None]
    for f in (group_centered, leave_one_out, lambda r: group_normalized(r, 1e-2)):
        torch.testing.assert_close(f(values), f(shifted), rtol=1e-9, atol=1e-9)
        assert f(values).sum(1).abs().max() < 1e-9


@settings(max_examples=60, deadline=None)
@given(rewards=st.lists(st.floats(-4, 4, width=32), min_size=8, max_size=8), scale=st.floats(0.1, 100))
def test_normalised_advantages_do_not_know_the_scale(rewards: list[float], scale: float) -> None:
    values = torch.tensor(rewards, dtype=torch.float64).view(2, 4)
    if values.std(1).min() > 1e-3:
        torch.testing.assert_close(
            group_normalized(values, 0.0), group_normalized(values * scale, 0.0), rtol=1e-7, atol=1e-9
        )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_on_policy_gradient_is_reinforce(kind: str, seed: int) -> None:
    b = batch(seed)
    extra: dict[str, Any] = {"old_log_probs": None, "beta": 0.0}
    _, gradient = run(b, kind, **extra)
    mask, rows = b["mask"].double(), b["mask"].shape[0]
    weight = {
        "bnpo": 1 / mask.sum().clamp(min=1),
        "dr_grpo": torch.tensor(1 / (rows * 11.0)),
        "dapo": torch.tensor(1 / 11.0),
        "cispo": torch.tensor(1 / 11.0),
        "vespo": torch.tensor(1 / 11.0),
        "luspo": torch.tensor(1 / rows),
    }.get(kind, 1 / (mask.sum(1, keepdim=True).clamp(min=1) * rows))
    torch.testing.assert_close(gradient, -b["advantages"][:, None] * mask * weight)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_gradient_agrees_with_finite_differences(kind: str, seed: int) -> None:
    b = batch(seed, rows=2, width=3)
    if kind in ("cispo", "vespo"):  # their weight is held constant on purpose; on-policy tests cover it
        return
    ratio = torch.exp(b["log_probs"] - b["old"])
    if ((ratio - 0.8).abs().min() < 1e-3) or ((ratio - 1.2).abs().min() < 1e-3):  # at a kink
        return
    _, gradient = run(b, kind)
    for i in range(2):
        for j in range(3):
            ends = []
            for step in (1e-6, -1e-6):
                moved = {**b, "log_probs": b["log_probs"].clone()}
                moved["log_probs"][i, j] += step
                ends.append(run(moved, kind)[0])
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(float(gradient[i, j]), rel=1e-4, abs=1e-7)


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS)
def test_mean_of_a_permutation(seed: int) -> None:
    b = batch(seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        masked_mean(b["log_probs"], b["mask"], 1),
        masked_mean(b["log_probs"][:, order], b["mask"][:, order], 1),
        equal_nan=True,
    )
