"""Signs of a run whose teacher does not help."""

from __future__ import annotations

from pathlib import Path

from algorist.diagnosis.rule import Facts, Unknown, rules_of

LEAST_LOG_PROB, STEPS, RISEN = -3.0, 12, 0.5
"""Nats per token under the teacher below which it finds one token in twenty likely; logged steps before it is said; and the rise from the
first of them that shows a student on its way."""
GROWN, NOISE = 1.5, 0.05
"""Factor, and nats per token, by which the reverse KL of a student that goes away from its teacher grows."""
LOST, SHRUNK = 0.1, 0.5
"""Share of right answers that a student loses on its way to a teacher that is worse; share of the first length below which completions
have collapsed."""


def teacher_is_the_start(f: Facts) -> bool:
    return (
        len({Path(str(f[key])).expanduser().resolve() for key in ("grpo.teacher.model", "model.name")}) == 1
    )


def teacher_knows_nothing(f: Facts) -> bool:
    # The first step has seen no update: what is low later may be the training's doing.
    last, start = _ends(f, "teacher/log_prob")[1], f.signals.series("teacher/log_prob")[0][1]
    return max(start, last) < LEAST_LOG_PROB and last < start + RISEN


def teacher_kl_rises(f: Facts) -> bool:
    first, last = _ends(f, "teacher/reverse_kl")
    return last > GROWN * first and last > first + NOISE


def teacher_is_worse(f: Facts) -> bool:
    kl, right = _ends(f, "teacher/reverse_kl"), _ends(f, "rewards/correct/mean")
    return kl[1] < kl[0] and right[1] < right[0] - LOST


def teacher_shortens(f: Facts) -> bool:
    length, right = _ends(f, "completions/mean_length"), _ends(f, "rewards/correct/mean")
    return length[1] < SHRUNK * length[0] and right[1] < right[0]


def _ends(f: Facts, name: str) -> tuple[float, float]:
    """Return medians of the first and the last quarter of a metric.

    Raises:
        Unknown: Fewer than ``STEPS`` steps, or no teacher.
    """
    from algorist.diagnosis.signals import ends, middle

    series, taught = f.signals.series(name), f.signals.series("teacher/reverse_kl")
    if len(series) < STEPS or not taught:
        raise Unknown(name)
    first, last = ends(series)
    return middle(first), middle(last)


def _slower(f: Facts) -> float:
    return float(f"{f.number('grpo.learning_rate', 1e-6) / 3:.1e}")


CHANGE = {
    "teacher_kl_rises": {"grpo.learning_rate": _slower},
    "teacher_shortens": lambda f: {"grpo.teacher.loss": "full"} if f.get("grpo.teacher") else {},
}
RULES = tuple(rules_of(Path(__file__).with_suffix(".yaml"), globals()))
