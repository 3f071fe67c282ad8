"""The public functions against independent float64 versions in numpy, with gradients worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from algorist.errors import ConfigError
from algorist.extensions.toolkit import (
    compute_entropy,
    compute_group_normalized_rewards,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
    dpo_loss,
    grpo_microbatch_train_step,
    sft_microbatch_train_step,
    token_log_probs,
)
from algorist.objectives import (
    LOSSES,
    advantage_named,
    k1,
    k2,
    k3,
    leave_one_out,
    masked_mean,
    masked_normalize,
    per_reward_normalized,
    policy_loss,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    sampler_weights,
    sequence_ratio,
    token_weights,
    truncated_weights,
    useful_groups,
)

Array = NDArray[np.float64]
RNG = np.random.default_rng(0)
B, T, V = 4, 5, 11
LOG_PROBS: Array = -RNG.random((B, T)) * 2
OLD: Array = LOG_PROBS + 0.4 * RNG.standard_normal((B, T))
ADVANTAGES: Array = np.array([1.5, -0.5, 0.0, -2.0])
MASK = np.array([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 1, 1, 1]])
LOGITS: Array = RNG.standard_normal((B, T, V)) * 3
LABELS = RNG.integers(0, V, (B, T))


def t(array: Array, grad: bool = False) -> torch.Tensor:
    return torch.tensor(array, requires_grad=grad)


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def close(ours: torch.Tensor | None, theirs: Array, atol: float = 1e-12) -> None:
    assert ours is not None
    np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-10, atol=atol)


def test_entropy_value_and_gradient() -> None:
    p = softmax(LOGITS)
    entropy = -(p * np.log(p)).sum(-1)
    weights = RNG.standard_normal((B, T))
    logits = t(LOGITS, grad=True)
    ours = compute_entropy(logits)
    close(ours, entropy)
    (ours * t(weights)).sum().backward()
    close(logits.grad, -p * (np.log(p) + entropy[..., None]) * weights[..., None])


@pytest.mark.slow
def test_entropy_in_chunks_and_at_the_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compute_entropy(t(LOGITS))
    monkeypatch.setattr("algorist.extensions.toolkit.policy_gradient._CHUNK_ELEMENTS", 3 * V)
    logits = t(LOGITS, grad=True)
    chunked = compute_entropy(logits)
    close(chunked, whole.numpy())
    assert torch.autograd.gradcheck(compute_entropy, (logits,))
    uniform = torch.zeros(2, 8, dtype=torch.float64)
    close(compute_entropy(uniform), np.full(2, math.log(8)))
    certain = torch.tensor(
        [[0.0, -math.inf, -math.inf], [1e4, 0.0, -1e4]], dtype=torch.float64, requires_grad=True
    )
    compute_entropy(certain).sum().backward()
    close(compute_entropy(certain), np.zeros(2))
    assert certain.grad is not None and bool(torch.isfinite(certain.grad).all())


def test_entropy_of_half_precision_is_computed_in_single() -> None:
    logits = t(LOGITS).bfloat16()
    assert compute_entropy(logits).dtype == torch.float32
    close(compute_entropy(logits).double(), compute_entropy(logits.double()).numpy(), atol=1e-5)


def test_token_log_probs_value_and_gradient() -> None:
    p = softmax(LOGITS)
    onehot = np.eye(V)[LABELS]
    logits = t(LOGITS, grad=True)
    ours = token_log_probs(logits, torch.tensor(LABELS))
    close(ours, np.log((p * onehot).sum(-1)))
    ours.sum().backward()
    close(logits.grad, onehot - p)
    half = token_log_probs(t(LOGITS), torch.tensor(LABELS), temperature=2.0)
    close(half, np.log((softmax(LOGITS / 2) * onehot).sum(-1)))


@pytest.mark.parametrize("dim", [None, 0, 1, -1])
def test_masked_mean_and_normalize(dim: int | None) -> None:
    total = np.where(MASK == 1, LOG_PROBS, 0).sum(dim)
    close(masked_mean(t(LOG_PROBS), torch.tensor(MASK), dim), total / MASK.sum(dim))
    close(masked_normalize(t(LOG_PROBS), torch.tensor(MASK), dim, 7.0), total / 7.0)


def test_masked_mean_of_nothing_is_nan_and_masked_nan_is_ignored() -> None:
    values = torch.tensor([[1.0, math.nan], [math.inf, 2.0]])
    assert math.isnan(masked_mean(values, torch.zeros(2, 2)))
    close(masked_mean(values, torch.tensor([[1, 0], [0, 1]]), 1).double(), np.array([1.0, 2.0]))
    assert torch.isnan(masked_mean(values, torch.tensor([[1, 0], [0, 0]]), 1)).tolist() == [False, True]


def test_kl_estimates() -> None:
    policy, reference = np.log(softmax(LOGITS[0, 0])), np.log(softmax(LOGITS[0, 1]))
    true = (np.exp(policy) * (policy - reference)).sum()
    expectation = [(np.exp(policy) * k(t(policy), t(reference)).numpy()).sum() for k in (k1, k2, k3)]
    assert expectation[0] == pytest.approx(true) and expectation[2] == pytest.approx(true)  # unbiased
    assert expectation[1] != pytest.approx(true)
    r = np.exp(reference - policy)
    close(k3(t(policy), t(reference)), r - 1 - np.log(r), atol=1e-9)
    assert float(k3(t(policy), t(reference)).min()) >= 0
    # The gradient of k2's expectation under the policy's samples is the gradient of the true KL.
    z = t(LOGITS[0, 0], grad=True)
    logp = torch.log_softmax(z, -1)
    (logp.exp().detach() * k2(logp, t(reference))).sum().backward()
    assert z.grad is not None
    sampled = z.grad.clone()
    z.grad = None
    logp = torch.log_softmax(z, -1)
    (logp.exp() * (logp - t(reference))).sum().backward()
    close(z.grad, sampled.numpy())


def clip_reference(cliprange: float) -> tuple[Array, Array]:
    """Return loss and gradient per token, element by element."""
    loss, gradient = np.zeros((B, T)), np.zeros((B, T))
    for b in range(B):
        for i in range(T):
            a, ratio = ADVANTAGES[b], math.exp(LOG_PROBS[b, i] - OLD[b, i])
            inside = min(max(ratio, 1 - cliprange), 1 + cliprange)
            loss[b, i] = -min(ratio * a, inside * a)
            active = ratio * a <= inside * a
            gradient[b, i] = -ratio * a if active else 0.0
    return loss, gradient


@pytest.mark.parametrize("cliprange", [0.05, 0.2, 10.0])
def test_grpo_clip_value_and_gradient(cliprange: float) -> None:
    loss, gradient = clip_reference(cliprange)
    log_probs = t(LOG_PROBS, grad=True)
    ours, metadata = compute_grpo_clip_loss(t(ADVANTAGES[:, None]), log_probs, t(OLD), cliprange)
    close(ours, loss)
    ours.sum().backward()
    close(log_probs.grad, gradient)
    free = np.exp(LOG_PROBS - OLD) * ADVANTAGES[:, None]
    assert metadata["clipped"].sum() == (-loss < free - 1e-15).sum()
    assert (cliprange == 10.0) == (float(metadata["clipped"].sum()) == 0)


def test_no_gradient_flows_into_the_old_policy() -> None:
    log_probs = t(LOG_PROBS, grad=True)
    compute_grpo_clip_loss(t(ADVANTAGES), log_probs, log_probs, 0.2)[0].sum().backward()
    close(log_probs.grad, np.repeat(-ADVANTAGES[:, None], T, 1))


def test_naive_loss_and_the_three_kinds() -> None:
    per_token = -ADVANTAGES[:, None] * LOG_PROBS
    close(compute_naive_policy_gradient_loss(t(ADVANTAGES[:, None]), t(LOG_PROBS)), per_token)
    close(compute_naive_policy_gradient_loss(t(ADVANTAGES), t(LOG_PROBS)), per_token)
    column = t(ADVANTAGES[:, None])
    kinds = {
        "no_baseline": compute_policy_gradient_loss(t(LOG_PROBS), "no_baseline", raw_rewards=column)[0],
        "reinforce": compute_policy_gradient_loss(t(LOG_PROBS), "reinforce_with_baseline", None, column)[0],
        "clip": compute_policy_gradient_loss(t(LOG_PROBS), "grpo_clip", None, column, t(OLD), 0.2)[0],
    }
    close(kinds["no_baseline"], per_token)
    close(kinds["reinforce"], per_token)
    close(kinds["clip"], clip_reference(0.2)[0])


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("no_baseline", {}, "raw_rewards"),
        ("reinforce_with_baseline", {"raw_rewards": t(ADVANTAGES)}, "advantages"),
        ("grpo_clip", {"advantages": t(ADVANTAGES)}, "old_log_probs, cliprange"),
        ("ppo", {}, "unknown loss_type 'ppo'"),
    ],
)
def test_missing_arguments_are_named(kind: str, given: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_policy_gradient_loss(t(LOG_PROBS), kind, **given)  # type: ignore[arg-type]


def test_sft_step_value_and_gradient() -> None:
    log_probs = t(LOG_PROBS, grad=True)
    loss, metadata = sft_microbatch_train_step(log_probs, torch.tensor(MASK), 2, 3.0)
    assert float(loss) == pytest.approx(-(LOG_PROBS * MASK).sum() / 3.0 / B / 2)
    close(log_probs.grad, -MASK / 3.0 / B / 2)
    assert float(metadata["nll_per_token"]) == pytest.approx(-(LOG_PROBS * MASK).sum() / MASK.sum())
    assert int(metadata["response_tokens"]) == MASK.sum()


@pytest.mark.parametrize("constant", [None, 8.0])
def test_grpo_step_value_and_gradient(constant: float | None) -> None:
    divisor = MASK.sum(-1, keepdims=True) if constant is None else constant
    per_token, gradient = clip_reference(0.2)
    log_probs = t(LOG_PROBS, grad=True)
    loss, metadata = grpo_microbatch_train_step(
        log_probs,
        torch.tensor(MASK),
        2,
        "grpo_clip",
        None,
        t(ADVANTAGES),
        t(OLD),
        0.2,
        normalize_constant=constant,
    )
    assert float(loss) == pytest.approx((per_token * MASK / divisor).sum() / B / 2)
    close(log_probs.grad, gradient * MASK / divisor / B / 2)
    assert 0 < float(metadata["clipped"]) < 1


def test_steps_with_rows_without_a_response() -> None:
    mask = torch.tensor(MASK).clone()
    mask[1] = 0
    for masked in (mask, torch.zeros_like(mask)):
        log_probs = t(LOG_PROBS, grad=True)
        loss, _ = grpo_microbatch_train_step(log_probs, masked, 1, "no_baseline", raw_rewards=t(ADVANTAGES))
        assert log_probs.grad is not None
        assert math.isfinite(loss) and bool(torch.isfinite(log_probs.grad).all())
        log_probs = t(LOG_PROBS, grad=True)
        loss, metadata = sft_microbatch_train_step(log_probs, masked, 1)
        assert math.isfinite(loss) and math.isfinite(metadata["nll_per_token"])


def test_group_normalized_rewards_has_three_results() -> None:
    scores = {"a": 1.0, "b": 0.0, "c": 0.5}

    def reward_fn(response: str, truth: str) -> dict[str, float]:
        right = scores[response] if truth == "x" else 0.25
        return {"reward": right, "format_reward": 1.0, "answer_reward": right}

    responses, truths = list("aabcca"), list("xxxxyy")
    raw = np.array([1, 1, 0, 0.5, 0.25, 0.25])
    for std in (True, False):
        ours, rewards, metadata = compute_group_normalized_rewards(reward_fn, responses, truths, 2, 1e-6, std)
        grouped = raw.reshape(3, 2)
        expected = grouped - grouped.mean(1, keepdims=True)
        if std:
            expected = expected / (grouped.std(1, ddof=1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(ours.numpy(), expected.ravel(), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(rewards.numpy(), raw)
        assert metadata["reward_mean"] == pytest.approx(raw.mean())
        assert metadata["format_reward_mean"] == 1.0 and metadata["useful_groups"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="6 responses for 5 ground truths"):
        compute_group_normalized_rewards(reward_fn, responses, truths[:5], 2, 1e-6, True)
    with pytest.raises(ValueError, match="multiple of group_size"):
        compute_group_normalized_rewards(reward_fn, responses, truths, 4, 1e-6, True)


def test_leave_one_out_is_reward_minus_the_others_mean() -> None:
    rewards = np.array([1.0, 2.0, 6.0, 0.0, 0.0, 3.0])
    expected = [r - np.delete(g, i).mean() for g in rewards.reshape(2, 3) for i, r in enumerate(g)]
    close(leave_one_out(t(rewards.reshape(2, 3))).flatten(), np.array(expected))
    assert leave_one_out(torch.tensor([[5.0], [7.0]])).tolist() == [[0.0], [0.0]]


def test_reinforce_plus_plus_by_hand() -> None:
    rewards = np.array([[1.0, 2.0, 6.0], [0.0, 0.0, 0.0], [3.0, np.nan, 1.0]])
    whole = (rewards - np.nanmean(rewards)) / np.nanstd(rewards, ddof=1)
    close(reinforce_plus_plus(t(rewards)), np.nan_to_num(whole), atol=1e-7)
    centred = rewards - np.nanmean(rewards, 1, keepdims=True)
    close(
        reinforce_plus_plus_baseline(t(rewards)),
        np.nan_to_num(centred / np.nanstd(centred, ddof=1)),
        atol=1e-7,
    )
    equal = torch.ones(2, 3, dtype=torch.float64)
    assert not reinforce_plus_plus(equal).any() and not reinforce_plus_plus_baseline(equal).any()


def test_per_reward_normalized_by_hand() -> None:
    """Two rewards of which the larger would drown the other, and a group in which they cancel."""
    components = np.zeros((2, 3, 2))
    components[0] = [[0.0, 0.1], [100.0, 0.2], [50.0, 0.0]]
    components[1] = [[1.0, -1.0], [0.0, 0.0], [3.0, -3.0]]
    weights = np.array([1.0, 2.0])
    spread = components.std(1, ddof=1, keepdims=True)
    total = ((components - components.mean(1, keepdims=True)) / (spread + 1e-4) * weights).sum(-1)
    expected = (total - total.mean()) / (total.std(ddof=1) + 1e-4)
    sums = t((components * weights).sum(-1))
    found = per_reward_normalized(sums, t(components), t(weights))
    close(found, expected)
    assert abs(float(found[0, 0]) - float(found[0, 2])) > 0.1, "the small reward is heard"
    unscored = sums.clone()
    unscored[0, 1] = math.nan
    assert per_reward_normalized(unscored, t(components), t(weights))[0, 1] == 0
    # All right, and a further reward of weight 0: no signal, whatever rounding leaves of the batch's mean.
    groups = torch.rand(9, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    groups[::2, :, 0] = 1.0
    found = per_reward_normalized(groups[..., 0], groups, t(np.array([1.0, 0.0])))
    assert not found[::2].any() and found[1::2].all()


@pytest.mark.parametrize(
    "name",
    [
        "group_centered",
        "group_normalized",
        "batch_normalized",
        "leave_one_out",
        "maxrl",
        "reinforce_plus_plus_baseline",
    ],
)
@pytest.mark.parametrize("reward", [1.2, 0.3, 1 / 3, 100.2, -0.1])
def test_a_group_of_equal_rewards_gets_exact_zeros(name: str, reward: float) -> None:
    """The mean of eight times 1.2 is not 1.2 in float32; the update leaves rows out whose advantages are 0, and no others."""
    useful = [0.0, 1.2] * 4
    for group in ([reward] * 8, [reward] * 7 + [math.nan], [math.nan] * 8):
        ours = advantage_named(name)(torch.tensor([group, useful]))
        assert ours[0].tolist() == [0.0] * 8 and ours[1].all()


def test_useful_groups() -> None:
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [math.nan, 1.0], [math.nan, math.nan]])
    assert useful_groups(rewards).tolist() == [False, True, False, False]


def test_sequence_ratio_is_the_geometric_mean() -> None:
    expected = [math.exp(((LOG_PROBS - OLD)[b][MASK[b] == 1]).mean()) for b in range(B)]
    close(sequence_ratio(t(LOG_PROBS), t(OLD), torch.tensor(MASK)), np.array(expected)[:, None])
    assert sequence_ratio(t(LOG_PROBS), t(OLD), torch.zeros(B, T)).tolist() == [[1.0]] * B


def test_truncated_weights() -> None:
    expected = np.minimum(np.exp(LOG_PROBS - OLD), 1.1) * MASK
    close(truncated_weights(t(LOG_PROBS), t(OLD), torch.tensor(MASK), cap=1.1), expected)


def test_dpo_loss_value_and_gradient() -> None:
    chosen, rejected = t(LOG_PROBS[:, 0], grad=True), t(LOG_PROBS[:, 1], grad=True)
    margin = (LOG_PROBS[:, 0] - LOG_PROBS[:, 1]) - (OLD[:, 0] - OLD[:, 1])
    loss = dpo_loss(chosen, rejected, t(OLD[:, 0]), t(OLD[:, 1]), 0.5)
    close(loss, np.log1p(np.exp(-0.5 * margin)))
    loss.sum().backward()
    close(chosen.grad, -0.5 / (1 + np.exp(0.5 * margin)))
    close(rejected.grad, 0.5 / (1 + np.exp(0.5 * margin)))


def test_denominators_by_hand() -> None:
    per_token = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    by_hand = {"grpo": (1.5 + 4) / 2, "bnpo": 7 / 3, "luspo": (3 + 4) / 2, "dapo": 7 / 3, "cispo": 7 / 3}

    def reduced(kind: str, denominator: float | None = None) -> float:
        return float(
            (per_token * token_weights(mask, LOSSES.get(kind).reduction, denominator=denominator)).sum()
        )

    for kind, value in by_hand.items():
        assert reduced(kind) == pytest.approx(value)
    assert reduced("dr_grpo", 10) == pytest.approx(7 / 20)
    assert reduced("dapo", 14) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="longest possible completion"):
        reduced("dr_grpo")
    with pytest.raises(ConfigError, match="unknown loss 'ppo'"):
        policy_loss(per_token, mask[:, 0].float(), mask, loss="ppo")
    with pytest.raises(ValueError, match="ref_log_probs is missing"):
        policy_loss(per_token, mask[:, 0].float(), mask, beta=0.1)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_sampler_weights_by_hand(mode: str) -> None:
    ratios = np.exp((LOG_PROBS - OLD) * MASK)
    if mode.startswith("sequence"):
        ratios = ratios.prod(1, keepdims=True)
    cut = (
        np.clip(ratios, 0.8, 1.1)
        if mode.endswith("truncate")
        else np.where((ratios < 0.8) | (ratios > 1.1), 0, ratios)
    )
    ours = sampler_weights(t(LOG_PROBS, grad=True), t(OLD), torch.tensor(MASK), mode, low=0.8, high=1.1)  # type: ignore[arg-type]
    close(ours, cut)
    assert not ours.requires_grad and not np.allclose(cut, ratios)
    unknown = torch.full((B, T), math.nan, dtype=torch.float64)
    assert bool((sampler_weights(t(LOG_PROBS), unknown, torch.tensor(MASK), mode) == 1).all())  # type: ignore[arg-type]
