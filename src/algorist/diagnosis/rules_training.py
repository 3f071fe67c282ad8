"""Rules about how the policy moves: rates, weights, entropy, KL, length, rewards, numbers. Thresholds are constants with their reason."""

from __future__ import annotations

from typing import Any

from algorist.diagnosis.rule import Facts, rule
from algorist.diagnosis.rules_rollouts import CORRECT, NEARLY_ALL
from algorist.diagnosis.weights import HALF_MOVED, MOVED_SHARE
from algorist.store.stages import LAST_FIRST

LEAST_RATE = 1e-8
"""Adam moves a weight by about the learning rate per step. At 1e-8 a thousand steps move it by 1e-5, a thousandth of
the usual size of a weight; recipes for full fine-tuning take 1e-7 to 1e-5."""
LEAST_KL = 1e-6
"""KL per token (nats) to the start below which completions are sampled as if nothing had happened."""
LEAST_RELATIVE = 1e-6
"""|end − start| / |start| of the weights below which float32 arithmetic itself is of the same size."""
MOVING_STEPS = 5
"""Steps with a gradient that must have been taken before a policy can be said not to move."""
KL_STEPS = 20
"""Steps at half the peak rate or more before the KL says that the policy does not move."""
SURE = 6.0
"""Standard errors for the steepest drop of a run: the step is chosen among all, so chance alone reaches 3 to 4."""
CLEAR = 4.0
"""Standard errors for the comparison of two fixed windows."""
HALVED = 0.5
"""A policy is broken when it keeps less than half of its accuracy."""
LEAST_DROP, LEAST_UNREADABLE = 0.1, 0.3
"""Smallest fall of the accuracy that is worth a warning, and of readable completions that shows a broken policy."""
ENTROPY_TIMES, ENTROPY_NATS = 2.0, 1.0
"""An entropy that doubled and grew by a nat per token while the reward did not rise: the policy turns into noise."""
COLLAPSED, NARROW = 0.1, 0.3
"""Share of the entropy that is left: below a tenth of the first exploration is over; below three tenths of the widest it is when
few groups still differ (``FEW_USEFUL``)."""
FEW_USEFUL = 0.3
"""Share of groups that teach below which most of the sampling is wasted."""
LEAST_ENTROPY = 0.01
"""Nats per token at the start; below it a model is deterministic anyway and has nothing to lose."""
GROWN, GROWN_TOKENS, LITTLE_GAIN = 1.5, 8, 0.05
"""Completions half as long again (and by 8 tokens) without five points of accuracy for it."""
KL_LARGE = 0.5
"""Nats per token: a completion of 20 tokens is e^10 times less likely under the reference."""
GAP = "sampling/sampling_logp_difference/mean"
GAP_LARGE = 0.1
"""Mean |sampler − trainer log-prob| in nats: tokens are off by 10 % on average. float32 gives 1e-6, bfloat16 engines
0.01 to 0.03."""
LOSS_TIMES, LOSS_NATS = 1.5, 0.5
"""The SFT loss rose from its best window to half as much again and by half a nat."""


def rounded(value: float) -> float:
    """Return a number with two significant digits."""
    return float(f"{value:.1e}")


def tenth(f: Facts) -> float:
    """Return a tenth of the rate, and at most 1e-3."""
    return rounded(min(f["learning_rate"] / 10, 1e-3))


def _usual(f: Facts) -> float:
    """Return a hundred times the rate, and at least the usual one."""
    usual = 2e-5 if f.stage == "sft" else 1e-5 if f.settings.get("model.lora") else 1e-6
    return rounded(max(100 * f["learning_rate"], usual))


@rule(
    1,
    facts="bad_steps saved_batches learning_rate model.dtype",
    says="The loss or its gradient is not a finite number; such steps are skipped and teach nothing.",
    change={
        "model.dtype": lambda f: "bfloat16" if f.settings.get("model.dtype") == "float32" else "float32",
        "{stage}.learning_rate": tenth,
        "{stage}.max_grad_norm": 0.5,
    },
    explains="learning_rate_too_large learning_rate_too_small weights_unchanged kl_blow_up no_signal",
    stages=LAST_FIRST,
    example="model.dtype=float32; grpo.learning_rate=3.0e-5; grpo.max_grad_norm=0.5",
)
def not_finite(f: Facts) -> bool:
    """The loss or its gradient is NaN or infinite. Such steps are skipped and teach nothing; five in a row end the run. The batch of
    each is kept as `grpo/bad-step-N.pt`.

    **Recognised**: one such step.

    **Change**: a lower learning rate, a lower gradient norm, bfloat16 or float32 instead of float16. If the first step already has it,
    the weights or a loss of your own are broken.
    """
    return bool(f["bad_steps"] or f["saved_batches"])


@rule(
    1,
    facts="moved_share moved_relative empty_adapter zero_gradient gradient_norm learning_rate model.dtype",
    says="The weights did not change: they are frozen, the adapter is not the one that is trained or saved, or bfloat16 weights round every "
    "update away.",
    change={
        "model.dtype": "float32",
        "model.lora": {"rank": 16, "alpha": 32},
        "{stage}.learning_rate": lambda f: _usual(f) if f["learning_rate"] <= LEAST_RATE else None,
    },
    stages=LAST_FIRST,
    example="model.dtype=float32; model.lora={rank: 16, alpha: 32}",
)
def weights_unchanged(f: Facts) -> bool:
    """The weights at the end are those of the start: they are frozen, the adapter that is saved is not the one that is trained, or
    bfloat16 rounds every update away.

    **Recognised**: after at least {MOVING_STEPS} steps with a gradient, fewer than {MOVED_SHARE} of the elements of any tensor differ,
    or every `lora_B` matrix is 0; or the gradient is exactly 0 in the recent steps while more than half of the groups differ in reward.

    **Change**: train float32 weights, or an adapter (its matrices are small enough for small updates).
    """
    still = f.get("zero_gradient") and f["same_reward"] < 0.5
    same = f.get("empty_adapter") or f.get("moved_share", 1.0) < MOVED_SHARE
    return bool(still or (same and f["steps_with_gradient"] >= MOVING_STEPS))


@rule(
    3,
    facts="moved_share moved_relative learning_rate model.dtype",
    says="Fewer than half of the weights have moved: they are kept in 16 bit, whose last digit is larger than most steps.",
    change={"model.dtype": "float32"},
    stages=LAST_FIRST,
    example="model.dtype=float32",
)
def weights_barely_move(f: Facts) -> bool:
    """The weights are kept in 16 bit, and most of Adam's steps are smaller than the distance to the next such number. Rounded at random,
    as here, they are right on average but coarse; trainers that round to the nearest lose them.

    **Recognised**: after at least {MOVING_STEPS} steps with a gradient, between {MOVED_SHARE} and {HALF_MOVED} of the elements of the
    tensor that changed most differ, and the weights of the end are stored in 16 bit.

    **Change**: float32 weights with 16-bit products, which is the default (leave `model.dtype` out).
    """
    moved = MOVED_SHARE <= f["moved_share"] < HALF_MOVED
    return bool(f["half"] and not f["empty_adapter"] and moved and f["steps_with_gradient"] >= MOVING_STEPS)


@rule(
    1,
    facts="learning_rate gradient_norm highest_kl moved_relative accuracy_by_step",
    says="The learning rate is too small: there is a gradient, but the policy does not move.",
    change={"{stage}.learning_rate": _usual},
    explains="weights_unchanged no_signal",
    stages=LAST_FIRST,
    example="grpo.learning_rate=1.0e-6",
)
def learning_rate_too_small(f: Facts) -> bool:
    """There is a gradient, but the policy does not move.

    **Recognised**: after at least {MOVING_STEPS} steps with a gradient: the rate never reaches {LEAST_RATE}; or the KL to the reference
    stays below {LEAST_KL} nats per token over at least {KL_STEPS} steps at half the peak rate or more; or the weights changed by less
    than {LEAST_RELATIVE} of their size.

    **Change**: a hundred times the rate. Usual for GRPO: 1e-6 for all weights, 1e-5 for an adapter; for SFT 2e-5. A tiny model from
    scratch takes 1e-4 to 1e-3.
    """
    by_kl = f["steps_at_rate"] >= KL_STEPS and f.get("highest_kl", 1.0) < LEAST_KL
    by_weights = f.get("moved_share", 0.0) >= MOVED_SHARE and f["moved_relative"] < LEAST_RELATIVE
    return bool(
        f["steps_with_gradient"] >= MOVING_STEPS and (f["learning_rate"] < LEAST_RATE or by_kl or by_weights)
    )


@rule(
    1,
    facts="accuracy_drop readable_drop entropy loss accuracy_by_step gradient_norm learning_rate",
    says="Training breaks the policy; most often the learning rate is too large.",
    change={
        "{stage}.learning_rate": tenth,
        "{stage}.warmup_steps": lambda f: max(10, int(f.number("{stage}.warmup_steps", 0))),
    },
    explains="no_stop truncated unparseable all_wrong identical_completions entropy_collapse length_growth nothing_answered no_signal",
    samples="wrong",
    stages=LAST_FIRST,
    example="grpo.learning_rate=3.0e-5; grpo.warmup_steps=10",
)
def learning_rate_too_large(f: Facts) -> bool:
    """Training breaks a policy that worked.

    **Recognised**, while the reward does not rise: the accuracy falls to less than half and by {LEAST_DROP:g} or more ({SURE} SE); or
    the share of readable completions does, by {LEAST_UNREADABLE:g} or more; or the entropy grows {ENTROPY_TIMES} times and by
    {ENTROPY_NATS} nat per token. In SFT: the loss rises to {LOSS_TIMES} times its best window and by {LOSS_NATS:g} nats.

    **Change**: a tenth of the rate, with a warm-up. Continue from a checkpoint before the drop, not from the newest one.
    """
    if f.stage == "sft":
        best, now = f["loss"]["best"], f["loss"]["last"]
        return bool(now > LOSS_TIMES * best and now > best + LOSS_NATS)
    entropy = f.get("entropy") or {"first": 0.0, "last": 0.0}
    noise = entropy["last"] > max(ENTROPY_TIMES * entropy["first"], entropy["first"] + ENTROPY_NATS)
    fell = _broke(f.get("accuracy_drop"), LEAST_DROP) or _broke(f.get("readable_drop"), LEAST_UNREADABLE)
    return bool((fell or noise) and not f["reward_rises"])


def _broke(drop: dict[str, float] | None, least: float) -> bool:
    if drop is None or drop["z"] > -SURE:
        return False
    return drop["after"] <= HALVED * drop["before"] and drop["before"] - drop["after"] >= least


@rule(
    2,
    facts="entropy same_reward identical accuracy_by_step",
    says="The policy became nearly deterministic before it became good: it no longer tries anything else.",
    change={
        # a distance of ratios per token
        "grpo.loss.clip_high": lambda f: 0.28 if 0.1 <= f.number("grpo.loss.clip_high", 0.0) < 0.28 else None,
        "grpo.learning_rate": lambda f: rounded(f["learning_rate"] / 3),
        "grpo.temperature": lambda f: max(1.0, f.number("grpo.temperature", 1.0)),
        "grpo.beta": lambda f: max(0.01, f.number("grpo.beta", 0.0)),
    },
    explains="identical_completions no_signal",
    samples="any",
    example="grpo.loss.clip_high=0.28; grpo.learning_rate=1.0e-4; grpo.beta=0.01; grpo.temperature=1.0",
)
def entropy_collapse(f: Facts) -> bool:
    """The policy became nearly deterministic before it became good. It no longer tries anything else.

    **Recognised**: less than {COLLAPSED} of the first entropy is left; or less than {NARROW} of the widest while fewer than {FEW_USEFUL}
    of the groups still differ in reward. Not said when more than {NEARLY_ALL} of the answers are right.

    **Change**: a higher upper clip (DAPO's "clip higher"), a lower rate, a small KL penalty, temperature 1.
    """
    entropy = f["entropy"]
    if entropy["first"] < LEAST_ENTROPY or f["pass_rate"] > NEARLY_ALL:
        return False
    narrowed = entropy["last"] < NARROW * entropy["widest"] and 1 - f["same_reward"] < FEW_USEFUL
    return bool(entropy["last"] < COLLAPSED * entropy["first"] or narrowed)


@rule(
    2,
    facts="length accuracy_gain truncated tokens_by_step",
    says="Completions grow longer without more right answers.",
    change=lambda f: {
        "grpo.loss.name": "dr_grpo",
        "grpo.advantage": "group_centered",
        "rewards": [CORRECT, _overlong(f["limit"])],
    },
    explains="truncated no_stop nothing_answered no_signal",
    samples="any",
    example="grpo.loss=dr_grpo; grpo.advantage=group_centered; "
    "rewards=[{name: correct, weight: 1.0}, {name: soft_overlong, weight: 0.5, params: {max_tokens: 80, cache_tokens: 20}}]",
)
def length_growth(f: Facts) -> bool:
    """Completions grow longer without more right answers.

    **Recognised**: from the first to the last window the mean length grows to {GROWN} times and by {GROWN_TOKENS} tokens ({CLEAR} SE),
    the accuracy by less than {LITTLE_GAIN:g}.

    **Change**: a loss that does not favour length (`dr_grpo`, no division by the deviation), and a price for length.
    """
    before, after = f["length"]["first"], f["length"]["last"]
    grown = after > GROWN * before and after > before + GROWN_TOKENS
    return bool(grown and f["accuracy_gain"] < LITTLE_GAIN and f["length"]["z"] >= CLEAR)


def _overlong(limit: int) -> dict[str, Any]:
    params = {"max_tokens": limit, "cache_tokens": max(1, limit // 4)}
    return {"name": "soft_overlong", "weight": 0.5, "params": params}


@rule(
    2,
    facts="kl first_kl grpo.beta learning_rate accuracy_by_step",
    says="The policy is far away from its reference: the KL divergence is no longer held by its penalty.",
    change={
        "grpo.beta": lambda f: max(10 * f.number("grpo.beta", 0.0), 0.04),
        "grpo.learning_rate": lambda f: rounded(f["learning_rate"] / 3),
    },
    samples="any",
    example="grpo.beta=0.04; grpo.learning_rate=1.0e-4",
)
def kl_blow_up(f: Facts) -> bool:
    """The policy is far away from its reference; the penalty no longer holds it. Only runs with `grpo.beta` above 0 log a KL. The
    reference is a frozen copy of the policy at the start of GRPO: the result of SFT where there was one.

    **Recognised**: the median KL of the last quarter of the logged steps is at least {KL_LARGE:g} nats per token. If the first step has
    it already, the reference is another model.

    **Change**: a larger penalty and a lower rate, or no penalty at all if the accuracy is good.
    """
    return bool(f["kl"] >= KL_LARGE)


@rule(
    2,
    facts="hacked rewards_apart tokens_by_step",
    says="The reward rises while fewer answers are right: the policy found something that pays better than solving.",
    change={
        "rewards": [CORRECT, {"name": "well_formed", "weight": 0.2}],
        "grpo.beta": lambda f: max(0.04, f.number("grpo.beta", 0.0)),
    },
    explains="length_growth unparseable truncated no_stop all_wrong nothing_answered no_signal",
    samples="paid",
    example="rewards=[{name: correct, weight: 1.0}, {name: well_formed, weight: 0.2}]; grpo.beta=0.04",
)
def reward_hacking(f: Facts) -> bool:
    """The reward rises while fewer answers are right. The policy found something that pays better than solving.

    **Recognised**: from the first or second third of the run to the last, the reward rises by {CLEAR} SE and the accuracy falls by
    {CLEAR} SE and by {LITTLE_GAIN:g} or more.

    **Change**: read the paid completions (`algorist inspect RUN --sort=-reward`). Lower the weight of the reward that rose; a verified
    answer must pay most.
    """
    up, down, lost = (f["hacked"][key] for key in ("reward_z", "accuracy_z", "lost"))
    return bool(up >= CLEAR and down <= -CLEAR and lost >= LITTLE_GAIN)


@rule(
    2,
    facts=f"{GAP} grpo.engine model.dtype model.lora.dropout",
    says="The engine that samples and the pass that trains disagree about the log-probabilities of the same tokens: float32 gives about 1e-6, "
    "bfloat16 0.01 to 0.03.",
    change=lambda f: (
        {"model.lora.dropout": 0.0}
        if f.number("model.lora.dropout", 0.0)
        else {"model.dtype": "float32", "grpo.engine": "transformers"}
    ),
    example="model.dtype=float32; grpo.engine=transformers",
)
def log_prob_mismatch(f: Facts) -> bool:
    """The engine that samples and the pass that trains disagree about the log-probabilities of the same tokens, so updates correct for
    another policy than the one that sampled.

    **Recognised**: the median over the last quarter of the logged steps of the mean absolute difference is at least {GAP_LARGE:g} nats
    per token. float32 gives about 1e-6, bfloat16 engines 0.01 to 0.03.

    **Change**: no dropout in the adapter (`model.lora.dropout`); float32; the `transformers` engine.
    """
    return bool(f[GAP] >= GAP_LARGE)
