"""The facts that follow from a run's signals; preflight and evaluations know some of them by other means.

Shares are of the recent window (``windows.recent``), where nothing else is said.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from algorist.diagnosis.rule import Facts, Share, Unknown, fact
from algorist.diagnosis.signals import (
    MIN_STEPS,
    BatchStatistics,
    Break,
    Moments,
    ends,
    last_quarter,
    middle,
    pooled,
    recent,
    steepest_drop,
    z_score,
)
from algorist.store.read import query
from algorist.store.safe_text import one_line
from algorist.store.stages import EVALUATED
from algorist.types import Problem

ENOUGH = 64
"""Completions that say enough in a single step; in two steps a quarter of them does."""
MOVING_STEPS = 5
"""Steps with a gradient that must have been taken before a policy can be said not to move."""
REWARD_RISES = 4.0
"""Standard errors from which on a reward rises: less may be chance, and hides no fall of the accuracy."""
ENOUGH_ENDED = 12
"""Completions that must have ended without the limit before missing tags are the model's and not the limit's doing."""


def window(f: Facts) -> list[BatchStatistics]:
    """Return the recent window (Unknown: too little)."""
    batches = recent(f.signals.batches)
    if not batches:
        raise Unknown("window")
    return batches


def share(batches: list[BatchStatistics], part: str, of: str = "groups") -> Share:
    """Return the share of a count in another one; 0 where there is nothing."""
    whole = sum(getattr(b, of) for b in batches)
    return Share(sum(getattr(b, part) for b in batches) / whole if whole else 0.0)


def span(batches: list[BatchStatistics]) -> str:
    """Return the steps of a window in words."""
    first, last = batches[0].step, batches[-1].step
    return f"steps {first}–{last}" if first != last else f"step {first}"


def _all(f: Facts) -> list[BatchStatistics]:
    """Return all batches (Unknown: too few to say that something never happened)."""
    batches = f.signals.batches
    if sum(b.rollouts for b in batches) < (ENOUGH if len(batches) < 2 else ENOUGH // 4):
        raise Unknown("batches")
    return batches


for _name, _of, _shows in (
    ("all_right", "groups", "{} of the groups are all right ({where})"),
    ("all_wrong", "groups", "{} of the groups are all wrong ({where})"),
    ("same_reward", "groups", "{} of the groups have one reward only ({where})"),
    ("identical", "groups", "{} of the groups hold one text only ({where})"),
    ("truncated", "rollouts", "{} of the completions are truncated ({where})"),
    ("truncated_answered", "truncated", "of the truncated ones {} hold an answer"),
    ("end_of_turn", "rollouts", "{} of the completions show an end-of-turn token as text"),
):
    fact(_shows, _name)(lambda f, part=_name, of=_of: share(window(f), part, of))
for _name, _form in (("accuracy", ".3f"), ("reward", ".3f"), ("readable", ".2f"), ("tokens", ".0f")):

    @fact(f"mean {_name} by step: {{}}", f"{_name}_by_step")
    def _(f: Facts, part: str = _name, form: str = _form) -> dict[str, str]:
        batches = f.signals.batches
        if not batches:
            raise Unknown(part)
        few = [*batches[: -1 : max(1, -(-len(batches) // 8))], batches[-1]]
        return {f"{b.step}:": format(getattr(b, part).mean, form) for b in few}


@fact("{}")
def where(f: Facts) -> str:
    return span(recent(f.signals.batches) or f.signals.batches)


@fact("{} of the answers are right")
def pass_rate(f: Facts) -> Share:
    return Share(pooled(window(f), lambda b: b.accuracy).mean)


@fact("completions of up to {} tokens")
def limit(f: Facts) -> int:
    return int(f.number("grpo.max_completion_tokens", 256))


@fact("prompt format {}")
def prompt_format(f: Facts) -> str:
    return str(f.settings.get("prompt.format", "reasoning_answer"))


@fact("{} of the finished completions are unreadable ({where})")
def finished_unreadable(f: Facts) -> Share:
    finished = sum(b.rollouts - b.truncated for b in window(f))
    if finished < ENOUGH_ENDED:
        raise Unknown("finished")
    return Share(sum(b.finished_unreadable for b in window(f)) / finished)


@fact("grading reasons: {}")
def reasons(f: Facts) -> dict[str, int]:
    batches = recent(f.signals.batches) or f.signals.batches
    return dict(sum((b.reasons for b in batches), Counter[str]()).most_common(4))


@fact("{silent} of {completions} completions have no answer that can be read")
def unreadable(f: Facts) -> Share:
    return share(_all(f), "unreadable", "rollouts")


@fact("{} completions without an answer")
def silent(f: Facts) -> int:
    return sum(b.unreadable for b in _all(f))


@fact("{} completions")
def completions(f: Facts) -> int:
    return sum(b.rollouts for b in _all(f))


@fact("{} of all completions are cut off at {limit} tokens")
def truncated_so_far(f: Facts) -> Share:
    return share(_all(f), "truncated", "rollouts")


@fact("{} groups")
def groups(f: Facts) -> int:
    return sum(b.groups for b in _all(f))


@fact("groups that differ in reward, since the first step: {}")
def differing_groups(f: Facts) -> int:
    return sum(b.groups - b.same_reward for b in _all(f))


@fact("mean reward of a step: from {}")
def rewards_from_to(f: Facts) -> str:
    means = [b.reward.mean for b in _all(f)]
    return f"{min(means):.3g} to {max(means):.3g}"


@fact("failures of each reward: {}")
def failures(f: Facts) -> dict[str, int]:
    count: Counter[str] = Counter()
    for line in f.signals.lines.get("grpo", ()):
        for key, value in line.items():
            if key.startswith("rewards/") and key.endswith("/failures"):
                count[key.split("/")[1]] += int(value or 0)
    return dict(count.most_common())


@fact("{}")
def failing_reward(f: Facts) -> str | None:
    return next((name for name, count in f["failures"].items() if count), None)


@fact("it failed on {failure_count} of {graded} completions")
def failing_share(f: Facts) -> Share:
    return Share(f["failure_count"] / f["graded"]) if f["graded"] else Share(0)


@fact("{} failures")
def failure_count(f: Facts) -> int:
    return int(f["failures"][f["failing_reward"]])


@fact("{} graded completions")
def graded(f: Facts) -> int:
    return sum(b.rollouts for b in f.signals.batches)


OF_THE_RUN = f"samples WHERE evaluation IN {EVALUATED}"
"""The run's own evaluations; what ``algorist eval`` adds may well ask training problems."""


@fact("{}")
def leaked(f: Facts) -> str | None:
    """Of a run, the questions of its rollouts, else those of its demonstrations; whoever has the data says it with ``leaked_text``."""
    run = f.signals.run
    if run is None or not any((run / "eval").glob("*.parquet")):
        return None
    rows = query(
        run,
        "SELECT count(DISTINCT question) AS evaluated, count(DISTINCT question) FILTER (trained) AS leaked, "
        "min(question) FILTER (trained) AS example "
        f"FROM (SELECT question, question IN (SELECT question FROM rollouts) AS trained FROM {OF_THE_RUN})",
    )
    (row,) = rows
    if row["leaked"]:
        return _leaked(row["leaked"], row["evaluated"], row["example"])
    if not f["demonstrations"]:
        return None
    evaluated = query(run, f"SELECT DISTINCT question FROM {OF_THE_RUN}")
    return leaked_text(f["demonstrations"], [Problem("", str(row["question"]), "") for row in evaluated])


def leaked_text(training: Sequence[Problem], held_out: Sequence[Problem]) -> str | None:
    """Return how many held-out problems are also trained on, with one of them; None where there is none."""
    from algorist.diagnosis.leakage import (
        overlap,  # which reads the schema, to which extensions add keys and rules
    )

    shared = overlap(training, held_out)
    return _leaked(len(shared), len(held_out), shared[0].question) if shared else None


def _leaked(count: int, of: int, example: str) -> str:
    return (
        f"{count} of {of} held-out problems are also in the training data, such as: {one_line(example, 120)}"
    )


# What shows in how the policy moves, of one stage.


@fact("learning rate at most {:g}")
def learning_rate(f: Facts) -> float:
    rates = [v for _, v in f.signals.series("learning_rate", f.stage)]
    return max([f.number("{stage}.learning_rate", 0.0), *rates])


@fact("gradient norm: median {}")
def gradient_norm(f: Facts) -> str | None:
    norms = f.signals.series("grad_norm", f.stage)
    if not norms:
        return None
    return f"{middle(norms):.3g}, largest {_highest(norms):.3g}, last {norms[-1][1]:.3g} of {len(norms)} logged steps"


@fact("steps whose loss or gradient is not finite: {}")
def bad_steps(f: Facts) -> list[int]:
    return [
        int(row["step"])
        for row in f.signals.lines.get(f.stage, [])
        if any(name in row and row[name] is None for name in ("loss", "grad_norm"))
        or (row.get("update/skipped") or 0.0) > 0
    ]


@fact("{} batches saved as {stage}/bad-step-*.pt")
def saved_batches(f: Facts) -> int:
    return f.signals.bad_steps.get(f.stage, 0)


@fact("{}")
def stage(f: Facts) -> str:
    return f.stage


@fact("{} logged steps had a gradient")
def steps_with_gradient(f: Facts) -> int:
    lines = f.signals.lines.get(f.stage, ())
    return sum((row.get("grad_norm") or 0.0) > 0 and (row.get("learning_rate") or 0.0) > 0 for row in lines)


@fact("{} steps at half the peak rate or more")
def steps_at_rate(f: Facts) -> int:
    return sum(v >= 0.5 * f["learning_rate"] for _, v in f.signals.series("learning_rate", f.stage))


@fact("the gradient is exactly 0 in the recent steps: {}")
def zero_gradient(f: Facts) -> bool:
    norms = [v for _, v in f.signals.series("grad_norm", f.stage)][-max(MIN_STEPS, len(window(f))) :]
    return f.stage == "grpo" and len(norms) >= MIN_STEPS and not any(norms)


for _name, _shows in (
    ("share", "{weights_compared}: at most {} of the elements of any tensor differ"),
    ("relative", "relative change of the weights {:.1e}"),
    ("empty_adapter", "every lora_B matrix is zero, so that the adapter does nothing: {}"),
    ("half", "the weights are stored in 16 bit: {}"),
    ("still", "{} of the weights between embedding and head are as they were"),
):

    @fact(_shows, {"share": "moved_share", "relative": "moved_relative"}.get(_name, _name))
    def _(f: Facts, part: str = _name) -> Any:
        change = f.signals.weights.get(f.stage)
        if change is None:
            return None
        return Share(getattr(change, part)) if part in ("share", "still") else getattr(change, part)


@fact("{}")
def weights_compared(f: Facts) -> str | None:
    if (change := f.signals.weights.get(f.stage)) is None:
        return None
    return f"{change.tensors} tensors of {change.start or 'the start'} and {f.stage}/{change.end}"


@fact("largest KL to the reference {:.1e} nats per token")
def highest_kl(f: Facts) -> float | None:
    kl = f.signals.series("kl", f.stage)
    return _highest(kl) if kl else None


@fact("KL {:.3g} nats per token, median of the last quarter of the logged steps")
def kl(f: Facts) -> float | None:
    return last_quarter(f.signals.series("kl", f.stage))


@fact("sampler and trainer differ by {:.2g} nats per token: median of the steps, or of their last quarter")
def sampler_gap(f: Facts) -> float | None:
    gaps = f.signals.series("sampling/sampling_logp_difference/mean", f.stage)
    return max(last_quarter(gaps) or 0.0, middle(gaps)) if len(gaps) >= MIN_STEPS else None


@fact("KL at the first step {:.3g} nats per token")
def first_kl(f: Facts) -> float | None:
    return next((v for _, v in f.signals.series("kl", f.stage)), None)


def _drop(drop: Break | None) -> dict[str, float] | None:
    if drop is None:
        return None
    return {"step": drop.step, "before": drop.before, "after": drop.after, "z": drop.z, "index": drop.index}


@fact("steepest fall of the accuracy: {accuracy_fell}")
def accuracy_drop(f: Facts) -> dict[str, float] | None:
    return _drop(steepest_drop(f.signals.batches, lambda b: b.accuracy))


@fact("steepest fall of the readable completions: {readable_fell}")
def readable_drop(f: Facts) -> dict[str, float] | None:
    return _drop(steepest_drop(f.signals.batches, lambda b: b.readable))


for _name, _drop_name in (("accuracy_fell", "accuracy_drop"), ("readable_fell", "readable_drop")):

    @fact("{}", _name)
    def _(f: Facts, of: str = _drop_name) -> str:
        d = f[of]
        return f"{d['before']:.2f} before step {d['step']}, {d['after']:.2f} since ({d['z']:.0f} SE)"


@fact("the reward rises at that step: {}")
def reward_rises(f: Facts) -> bool:
    drop = f.get("accuracy_drop") or f.get("readable_drop")
    if drop is None:
        return False
    at = int(drop["index"])
    parts = f.signals.batches[:at], f.signals.batches[at:]
    before, after = (pooled(part, lambda b: b.reward) for part in parts)
    return z_score(before, after, least_variance=1e-6) > REWARD_RISES


@fact("entropy in nats per token: {}")
def entropy(f: Facts) -> dict[str, float] | None:
    """At the start, at its widest, and at the end, as medians of windows."""
    series = f.signals.series("entropy")
    first, last = ends(series)
    if not first:
        return None
    # A policy that is certain at the start explores first, then narrows: what it had at its widest counts there.
    widest = max(middle(series[i : i + len(last)]) for i in range(len(series) - 2 * len(last) + 1))
    values = {"first": middle(first), "widest": max(widest, middle(first)), "last": middle(last)}
    return {name: float(f"{value:.3g}") for name, value in values.items()}


@fact("loss: {}")
def loss(f: Facts) -> dict[str, float] | None:
    """In its best window, and in the last one."""
    losses = f.signals.series("loss", f.stage)
    first, last = ends(losses)
    if not first:
        return None
    best = min(middle(losses[i : i + len(last)]) for i in range(len(losses) - len(last) + 1))
    return {"best": float(f"{best:.3g}"), "last": float(f"{middle(last):.3g}")}


@fact("mean tokens: {}")
def length(f: Facts) -> dict[str, float] | None:
    """At the start and at the end; ``z`` is the difference in standard errors."""
    first, last = ends(f.signals.batches)
    if not first:
        return None
    before, after = pooled(first, lambda b: b.tokens), pooled(last, lambda b: b.tokens)
    return {
        "first": round(before.mean, 1),
        "last": round(after.mean, 1),
        "z": round(z_score(before, after, least_variance=1.0), 1),
    }


@fact("within the groups the rewards follow the length: correlation {:+.2f}")
def length_paid(f: Facts) -> float | None:
    """Correlate the rewards of all rollouts with their tokens, each less its group's mean."""
    if (run := f.signals.run) is None:
        return None
    less_mean = '{0} - avg({0}) OVER (PARTITION BY stage, step, "group")'
    columns = f"{less_mean.format('reward')} AS paid, {less_mean.format('completion_tokens')} AS longer"
    (row,) = query(
        run, f"SELECT corr(paid, longer) AS r FROM (SELECT {columns} FROM rollouts WHERE isfinite(reward))"
    )
    return row["r"] if row["r"] == row["r"] else None


@fact("from the first to the last window the accuracy changes by {:+.3f}")
def accuracy_gain(f: Facts) -> float | None:
    first, last = ends(f.signals.batches)
    return (
        pooled(last, lambda b: b.accuracy).mean - pooled(first, lambda b: b.accuracy).mean if first else None
    )


@fact("{}")
def hacked(f: Facts) -> dict[str, Any]:
    """From an earlier third of the run to the last, where the reward gained most: reward and accuracy, and both in standard errors."""
    batches = f.signals.batches
    third = len(batches) // 3
    if third < 2:
        raise Unknown("thirds")
    last, seen = batches[-third:], []
    for earlier in (batches[:third], batches[third : 2 * third]):
        rewards = [pooled(p, lambda b: b.reward) for p in (earlier, last)]
        right = [pooled(p, lambda b: b.accuracy) for p in (earlier, last)]
        spread = 1e-4 * max(abs(rewards[0].mean), abs(rewards[1].mean), 1e-3) ** 2
        seen.append(
            {
                "from": f"{span(earlier)} → {span(last)}",
                "reward": _arrow(rewards),
                "accuracy": _arrow(right),
                "lost": round(right[0].mean - right[1].mean, 3),
                "reward_z": round(z_score(*rewards, least_variance=spread), 2),
                "accuracy_z": round(z_score(*right, least_variance=0.01), 2),
            }
        )
    return min(seen, key=lambda s: s["accuracy_z"] - s["reward_z"])


@fact("single rewards, first and last step: {}")
def rewards_apart(f: Facts) -> str:
    names = sorted((f.signals.lines.get("grpo") or [{}])[-1])
    means = [name for name in names if name.startswith("rewards/") and name.endswith("/mean")]
    pairs = [(name.split("/")[1], series) for name in means if (series := f.signals.series(name))]
    if not pairs:
        raise Unknown("rewards")
    return ", ".join(f"{name} {series[0][1]:.3g} → {series[-1][1]:.3g}" for name, series in pairs)


def _arrow(pair: list[Moments]) -> str:
    return f"{pair[0].mean:.3g} → {pair[1].mean:.3g}"


def _highest(pairs: list[tuple[int, float]]) -> float:
    return max((v for _, v in pairs), default=math.nan)
