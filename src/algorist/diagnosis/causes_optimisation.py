"""The causes that show in how the policy moves: rates, weights, entropy, KL, length, rewards, numbers."""

from __future__ import annotations

import math

from algorist.diagnosis.causes_rollouts import CAUSES, by_step, percent, share, span
from algorist.diagnosis.findings import Finding
from algorist.diagnosis.signals import Signals
from algorist.diagnosis.weights import HALF_MOVED, MOVED_SHARE, WeightChange
from algorist.diagnosis.windows import MIN_STEPS, Break, ends, middle, pooled, recent, steepest_drop, z_score
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
LEAST_DROP = 0.1
"""Smallest fall of the accuracy that is worth a warning, and of readable completions that shows a broken policy (×3)."""
ENTROPY_TIMES, ENTROPY_NATS = 2.0, 1.0
"""An entropy that doubled and grew by a nat per token while the reward did not rise: the policy turns into noise."""
COLLAPSED, NARROW = 0.1, 0.3
"""Share of the entropy that is left: below a tenth of the first exploration is over; below three tenths of the widest it is when
few groups still differ (``FEW_USEFUL``)."""
FEW_USEFUL = 0.3
LEAST_ENTROPY = 0.01
"""Nats per token at the start; below it a model is deterministic anyway and has nothing to lose."""
GROWN, GROWN_TOKENS, LITTLE_GAIN = 1.5, 8, 0.05
"""Completions half as long again (and by 8 tokens) without five points of accuracy for it."""
KL_LARGE = 0.5
"""Nats per token: a completion of 20 tokens is e^10 times less likely under the reference."""
GAP_LARGE = 0.1
"""Mean |sampler − trainer log-prob| in nats: tokens are off by 10 % on average. float32 gives 1e-6, bfloat16 engines
0.01 to 0.03."""
LOSS_TIMES, LOSS_NATS = 1.5, 0.5
"""The SFT loss rose from its best window to half as much again and by half a nat."""


def _rate(signals: Signals, stage: str) -> float:
    rates = [v for _, v in signals.series("learning_rate", stage)]
    return max([signals.settings.number(f"{stage}.learning_rate", 0.0), *rates])


def _rate_and_dtype(signals: Signals, stage: str) -> str:
    return f"learning rate {_rate(signals, stage):g}, dtype {signals.settings.get('model.dtype', 'auto')}"


def _moved(change: WeightChange, stage: str) -> str:
    return (
        f"{change.start} and {stage}/{change.end}: at most {percent(change.share)} of the elements of any of "
        f"{change.tensors} tensors differ, relative change {change.relative:.1e}"
    )


def _steps_with_gradient(signals: Signals, stage: str) -> int:
    return sum(
        1
        for row in signals.lines.get(stage, ())
        if (row.get("grad_norm") or 0.0) > 0 and (row.get("learning_rate") or 0.0) > 0
    )


def _steps_at_rate(signals: Signals, stage: str) -> int:
    half = 0.5 * _rate(signals, stage)
    return sum(1 for _, v in signals.series("learning_rate", stage) if v >= half)


@CAUSES.register("not_finite")
def not_finite(signals: Signals) -> Finding | None:
    """The loss or the gradient is NaN or infinite; such steps are skipped."""
    for stage in LAST_FIRST:
        lines = signals.lines.get(stage, [])
        bad = [
            row["step"]
            for row in lines
            if any(name in row and row[name] is None for name in ("loss", "grad_norm"))
            or (row.get("update/skipped") or 0.0) > 0
        ]
        saved = signals.bad_steps.get(stage, 0)
        if not bad and not saved:
            continue
        return Finding(
            "not_finite",
            "The loss or its gradient is not a finite number; such steps are skipped and teach nothing.",
            1,
            (
                f"{len(bad)} of {len(lines)} logged steps ({', '.join(map(str, bad[:8]))}{', …' if len(bad) > 8 else ''})",
                f"{saved} batches saved as {stage}/bad-step-*.pt",
                _rate_and_dtype(signals, stage),
            ),
            (),
            signals.settings.change(
                model__dtype="float32" if signals.settings.get("model.dtype") != "float32" else "bfloat16",
                **{f"{stage}__learning_rate": _tenth(signals, stage), f"{stage}__max_grad_norm": 0.5},
            ),
            stage,
        )
    return None


@CAUSES.register("weights_unchanged")
def weights_unchanged(signals: Signals) -> Finding | None:
    """The weights at the end are those of the start, or the gradient is exactly zero while groups differ."""
    for stage in LAST_FIRST:
        change = signals.weights.get(stage)
        window = recent(signals.batches) if stage == "grpo" else []
        norms = [v for _, v in signals.series("grad_norm", stage)][-max(MIN_STEPS, len(window)) :]
        still = (
            bool(window) and len(norms) >= MIN_STEPS and not any(norms) and share(window, "same_reward") < 0.5
        )
        same = change is not None and (change.empty_adapter or change.share < MOVED_SHARE)
        if not still and not (same and _steps_with_gradient(signals, stage) >= MOVING_STEPS):
            continue
        facts = []
        if change is not None and change.tensors:
            facts.append(_moved(change, stage))
        if change is not None and change.empty_adapter:
            facts.append(f"every lora_B matrix in {stage}/{change.end} is zero: the adapter does nothing")
        if norms:
            facts.append(
                f"gradient norm, last {len(norms)} logged steps: {', '.join(f'{v:.2g}' for v in norms[-5:])}"
            )
        facts.append(_rate_and_dtype(signals, stage))
        return Finding(
            "weights_unchanged",
            "The weights did not change: they are frozen, the adapter is not the one that is trained or saved, or bfloat16 "
            "weights round every update away.",
            1,
            tuple(facts),
            (),
            signals.settings.change(model__dtype="float32", model__lora={"rank": 16, "alpha": 32}),
            stage,
        )
    return None


@CAUSES.register("weights_barely_move")
def weights_barely_move(signals: Signals) -> Finding | None:
    """Weights kept in 16 bit, of which fewer than half have changed: most steps are smaller than their last digit."""
    for stage in LAST_FIRST:
        change = signals.weights.get(stage)
        if change is None or not change.half or change.empty_adapter:
            continue
        if (
            not MOVED_SHARE <= change.share < HALF_MOVED
            or _steps_with_gradient(signals, stage) < MOVING_STEPS
        ):
            continue
        return Finding(
            "weights_barely_move",
            "Fewer than half of the weights have moved: they are kept in 16 bit, whose last digit is larger than most steps.",
            3,
            (_moved(change, stage), _rate_and_dtype(signals, stage)),
            (),
            signals.settings.change(model__dtype="float32"),
            stage,
        )
    return None


@CAUSES.register("learning_rate_too_small")
def learning_rate_too_small(signals: Signals) -> Finding | None:
    """There is a gradient, but steps are too small to change what is sampled."""
    for stage in LAST_FIRST:
        if _steps_with_gradient(signals, stage) < MOVING_STEPS:
            continue
        rate, change = _rate(signals, stage), signals.weights.get(stage)
        kl = signals.series("kl", stage)
        by_rate = rate < LEAST_RATE
        by_kl = len(kl) >= KL_STEPS and _steps_at_rate(signals, stage) >= KL_STEPS and _highest(kl) < LEAST_KL
        by_weights = change and change.share >= MOVED_SHARE and change.relative < LEAST_RELATIVE
        if not (by_rate or by_kl or by_weights):
            continue
        norms = signals.series("grad_norm", stage)
        facts = [
            f"learning rate at most {rate:g}; gradient norm {middle(norms):.3g} (median of {len(norms)} logged steps)"
        ]
        if kl:
            facts.append(f"largest KL to the reference {_highest(kl):.1e} nats per token")
        if change is not None and change.tensors:
            facts.append(
                f"relative change of the weights {change.relative:.1e} ({change.start} → {stage}/{change.end})"
            )
        if signals.batches and stage == "grpo":
            facts.append(by_step(signals, "accuracy"))
        usual = 1e-5 if signals.settings.get("model.lora") else 1e-6
        usual = 2e-5 if stage == "sft" else usual
        return Finding(
            "learning_rate_too_small",
            "The learning rate is too small: there is a gradient, but the policy does not move.",
            1,
            tuple(facts),
            (),
            signals.settings.change(**{f"{stage}__learning_rate": _rounded(max(100 * rate, usual))}),
            stage,
        )
    return None


@CAUSES.register("learning_rate_too_large")
def learning_rate_too_large(signals: Signals) -> Finding | None:
    """Training breaks a policy that worked: accuracy, readable completions and reward fall together, or entropy explodes."""
    batches = signals.batches
    right = steepest_drop(batches, lambda b: b.accuracy)
    read = steepest_drop(batches, lambda b: b.readable)
    facts: list[str] = []
    if right and right.z <= -SURE and right.after <= HALVED * right.before and _fell(right, LEAST_DROP):
        facts.append(
            f"accuracy {right.before:.2f} before step {right.step}, {right.after:.2f} since ({right.z:.0f} SE)"
        )
    if read and read.z <= -SURE and read.after <= HALVED * read.before and _fell(read, 3 * LEAST_DROP):
        facts.append(
            f"readable completions {percent(read.before)} before step {read.step}, {percent(read.after)} since"
        )
    first, last = ends(signals.series("entropy"))
    if first and middle(last) > ENTROPY_TIMES * middle(first) and middle(last) > middle(first) + ENTROPY_NATS:
        facts.append(f"entropy {middle(first):.2f} → {middle(last):.2f} nats per token")
    if facts and not _reward_rises(signals, (right or read)):
        facts.append(by_step(signals, "accuracy"))
        norms = signals.series("grad_norm")
        if norms:
            facts.append(f"gradient norm: median {middle(norms):.3g}, largest {_highest(norms):.3g}")
        return _too_large(signals, "grpo", facts, signals.samples("wrong"))
    losses = signals.series("loss", "sft")
    first, last = ends(losses)
    if first:
        count = len(last)
        best = min(middle(losses[i : i + count]) for i in range(len(losses) - count + 1))
        now = middle(last)
        if now > LOSS_TIMES * best and now > best + LOSS_NATS:
            told = f"SFT loss {best:.2f} in its best {count} logged steps, {now:.2f} in the last ones"
            return _too_large(signals, "sft", [told], ())
    return None


def _fell(drop: Break, least: float) -> bool:
    return drop.before - drop.after >= least


def _reward_rises(signals: Signals, drop: Break | None) -> bool:
    if drop is None:
        return False
    before = pooled(signals.batches[: drop.index], lambda b: b.reward)
    after = pooled(signals.batches[drop.index :], lambda b: b.reward)
    return z_score(before, after, least_variance=1e-6) > 0


def _too_large(signals: Signals, stage: str, facts: list[str], samples: tuple[str, ...]) -> Finding:
    now = int(signals.settings.number(f"{stage}.warmup_steps", 0))
    return Finding(
        "learning_rate_too_large",
        "Training breaks the policy; most often the learning rate is too large.",
        1,
        (*facts, f"learning rate {_rate(signals, stage):g}"),
        samples,
        signals.settings.change(
            **{f"{stage}__learning_rate": _tenth(signals, stage), f"{stage}__warmup_steps": max(10, now)}
        ),
        stage,
    )


@CAUSES.register("entropy_collapse")
def entropy_collapse(signals: Signals) -> Finding | None:
    """The policy became nearly deterministic before it became good."""
    series = signals.series("entropy")
    first, last = ends(series)
    window = recent(signals.batches)
    if not first or not window or middle(first) < LEAST_ENTROPY:
        return None
    # A policy that is certain at the start explores first, then narrows: what it had at its widest counts there.
    size = len(last)
    widest = max(middle(series[i : i + size]) for i in range(len(series) - 2 * size + 1))
    left, narrowed = middle(last) / middle(first), middle(last) / max(widest, middle(first))
    useful = 1 - share(window, "same_reward")
    good = pooled(window, lambda b: b.accuracy).mean > 0.9
    if good or not (left < COLLAPSED or (narrowed < NARROW and useful < FEW_USEFUL)):
        return None
    narrow = (
        0.1 <= signals.settings.number("grpo.loss.clip_high", 0.0) < 0.28
    )  # a distance of ratios per token
    return Finding(
        "entropy_collapse",
        "The policy became nearly deterministic before it became good: it no longer tries anything else.",
        2,
        (
            f"entropy {max(widest, middle(first)):.3g} → {middle(last):.3g} nats per token ({percent(narrowed)} is left)",
            f"groups that still differ in reward: {percent(useful)}; of one text only: "
            f"{percent(share(window, 'identical'))} ({span(window)})",
            by_step(signals, "accuracy"),
        ),
        signals.samples("any"),
        signals.settings.change(
            **({"grpo__loss__clip_high": 0.28} if narrow else {}),
            grpo__learning_rate=_rounded(_rate(signals, "grpo") / 3),
            grpo__temperature=max(1.0, signals.settings.number("grpo.temperature", 1.0)),
            grpo__beta=max(0.01, signals.settings.number("grpo.beta", 0.0)),
        ),
    )


@CAUSES.register("length_growth")
def length_growth(signals: Signals) -> Finding | None:
    """Completions grow without becoming better."""
    first, last = ends(signals.batches)
    if not first:
        return None
    before, after = pooled(first, lambda b: b.tokens), pooled(last, lambda b: b.tokens)
    gain = pooled(last, lambda b: b.accuracy).mean - pooled(first, lambda b: b.accuracy).mean
    grown = after.mean > GROWN * before.mean and after.mean > before.mean + GROWN_TOKENS
    if not grown or gain >= LITTLE_GAIN or z_score(before, after, least_variance=1.0) < CLEAR:
        return None
    limit = int(signals.settings.number("grpo.max_completion_tokens", 256))
    return Finding(
        "length_growth",
        "Completions grow longer without more right answers.",
        2,
        (
            f"mean tokens {before.mean:.0f} ({span(first)}) → {after.mean:.0f} ({span(last)})",
            f"accuracy changes by {gain:+.3f}; truncated: {percent(share(last, 'truncated', 'rollouts'))}",
            f"mean {by_step(signals, 'tokens', '.0f')}",
        ),
        signals.samples("any"),
        signals.settings.change(grpo__loss__name="dr_grpo", grpo__advantage="group_centered")
        + "\nrewards:\n  - {name: correct, weight: 1.0}\n  - {name: soft_overlong, weight: 0.5, params: "
        + f"{{max_tokens: {limit}, cache_tokens: {max(1, limit // 4)}}}}}",
    )


@CAUSES.register("kl_blow_up")
def kl_blow_up(signals: Signals) -> Finding | None:
    """The policy left the reference far behind."""
    kl = signals.series("kl")
    last = kl[-max(MIN_STEPS, len(kl) // 4) :]
    if len(kl) < MIN_STEPS or middle(last) < KL_LARGE:
        return None
    beta = signals.settings.number("grpo.beta", 0.0)
    rate = _rate(signals, "grpo")
    early = (
        "at the first step already, so the reference is another model"
        if kl[0][1] > KL_LARGE
        else "at the first step"
    )
    return Finding(
        "kl_blow_up",
        "The policy is far away from its reference: the KL divergence is no longer held by its penalty.",
        2,
        (
            f"KL {middle(last):.3g} nats per token (median of steps {last[0][0]}–{last[-1][0]}), {kl[0][1]:.3g} {early}",
            f"beta {beta:g}, learning rate {rate:g}",
            *([by_step(signals, "accuracy")] if signals.batches else []),
        ),
        signals.samples("any"),
        signals.settings.change(grpo__beta=max(10 * beta, 0.04), grpo__learning_rate=_rounded(rate / 3)),
    )


@CAUSES.register("reward_hacking")
def reward_hacking(signals: Signals) -> Finding | None:
    """The reward rises while the graded accuracy falls."""
    third = len(signals.batches) // 3
    if third < 2:
        return None
    parts = [signals.batches[:third], signals.batches[third : 2 * third], signals.batches[-third:]]
    last = parts[-1]
    for earlier in parts[:2]:
        rewards = [pooled(p, lambda b: b.reward) for p in (earlier, last)]
        right = [pooled(p, lambda b: b.accuracy) for p in (earlier, last)]
        spread = 1e-4 * max(abs(rewards[0].mean), abs(rewards[1].mean), 1e-3) ** 2
        up = z_score(*rewards, least_variance=spread)
        down = z_score(*right, least_variance=0.01)
        if up < CLEAR or down > -CLEAR or right[0].mean - right[1].mean < LEAST_DROP / 2:
            continue
        by_reward = [
            f"{name.removeprefix('rewards/').removesuffix('/mean')} {series[0][1]:.3g} → {series[-1][1]:.3g}"
            for name in sorted(signals.lines.get("grpo", [{}])[-1])
            if name.startswith("rewards/") and name.endswith("/mean") and (series := signals.series(name))
        ]
        return Finding(
            "reward_hacking",
            "The reward rises while fewer answers are right: the policy found something that pays better than solving.",
            2,
            (
                f"reward {rewards[0].mean:.3g} → {rewards[1].mean:.3g}, accuracy {right[0].mean:.3f} → {right[1].mean:.3f} "
                f"({span(earlier)} → {span(last)})",
                *([f"single rewards, first and last step: {', '.join(by_reward)}"] if by_reward else []),
                f"mean {by_step(signals, 'tokens', '.0f')}",
            ),
            signals.samples("paid"),
            "rewards:  # lower the weight of what rose; a verified answer must pay most\n"
            "  - {name: correct, weight: 1.0}\n  - {name: well_formed, weight: 0.2}\n"
            + signals.settings.change(grpo__beta=max(0.04, signals.settings.number("grpo.beta", 0.0))),
        )
    return None


@CAUSES.register("log_prob_mismatch")
def log_prob_mismatch(signals: Signals) -> Finding | None:
    """The sampler's log-probs are not the trainer's: updates correct for another policy than the one that sampled."""
    name = "sampling/sampling_logp_difference/mean"
    gaps = signals.series(name)
    last = gaps[-max(MIN_STEPS, len(gaps) // 4) :]
    if len(gaps) < MIN_STEPS or middle(last) < GAP_LARGE:
        return None
    dropout = signals.settings.number("model.lora.dropout", 0.0)
    change: dict[str, object] = {
        "model__dtype": "float32",
        "grpo__engine": "transformers",
        "grpo__fast_update": False,
    }
    if dropout:
        change = {"model__lora__dropout": 0.0}
    return Finding(
        "log_prob_mismatch",
        "The engine that samples and the pass that trains disagree about the log-probabilities of the same tokens.",
        2,
        (
            f"mean |difference| {middle(last):.3g} nats per token (median of steps {last[0][0]}–{last[-1][0]}); float32 "
            "gives about 1e-6, bfloat16 0.01 to 0.03",
            f"{name}: first {gaps[0][1]:.2g}, largest {_highest(gaps):.2g}",
            f"engine {signals.settings.get('grpo.engine', 'auto')}, dtype {signals.settings.get('model.dtype', 'auto')}, "
            f"LoRA dropout {dropout:g}",
        ),
        (),
        signals.settings.change(**change),
    )


def _highest(pairs: list[tuple[int, float]]) -> float:
    return max((v for _, v in pairs), default=math.nan)


def _tenth(signals: Signals, stage: str) -> float:
    return _rounded(min(_rate(signals, stage) / 10, 1e-3))


def _rounded(value: float) -> float:
    """Return a number with two significant digits."""
    return float(f"{value:.1e}")
