"""What a run with a teacher is recognised by, where it does not help."""

from __future__ import annotations

from algorist.diagnosis.rule import Facts, Unknown, make_rule

LEAST_LOG_PROB, STEPS, RISEN = -3.0, 12, 0.5
"""Nats per token under the teacher below which it finds one token in twenty likely; logged steps before it is said; and the rise from the
first of them that shows a student on its way."""
GROWN, NOISE = 1.5, 0.05
"""Factor, and nats per token, by which the reverse KL of a student that goes away from its teacher grows."""
LOST = 0.1
"""Share of right answers that a student loses on its way to a teacher that is worse."""
SHRUNK = 0.5
"""Share of the first length below which completions have collapsed."""


def teacher_knows_nothing(f: Facts) -> bool:
    """The teacher finds what the student writes unlikely, and that does not change: it does not know the task or the prompt format, so
    its term pulls the policy to noise.

    **Recognised**: after at least {STEPS} logged steps the mean log-prob of a token under the teacher is below {LEAST_LOG_PROB} nats in
    the last quarter, and no more than {RISEN:g} above the first steps.

    **Change**: a teacher that was trained on the format (`grpo.teacher.model`), or none: rewards alone.
    """
    first, last = _ends(f, "teacher/log_prob")
    return last < LEAST_LOG_PROB and last < first + RISEN


def teacher_kl_rises(f: Facts) -> bool:
    """The student goes away from its teacher: steps are too large, or a reward pulls the other way.

    **Recognised**: after at least {STEPS} logged steps the reverse KL of the last quarter is {GROWN:g} times that of the first, and
    {NOISE:g} nats per token above it.

    **Change**: a smaller learning rate; where rewards have weights, a larger `grpo.teacher.weight`.
    """
    first, last = _ends(f, "teacher/reverse_kl")
    return last > GROWN * first and last > first + NOISE


def teacher_is_worse(f: Facts) -> bool:
    """The student comes closer to its teacher and solves less: on these problems the teacher is the worse of the two.

    **Recognised**: after at least {STEPS} logged steps the reverse KL is lower than in the first quarter, and the share of right answers
    is {LOST:g} lower.

    **Change**: a teacher that `algorist preflight` finds better than the student, or none.
    """
    kl, right = _ends(f, "teacher/reverse_kl"), _ends(f, "rewards/correct/mean")
    return kl[1] < kl[0] and right[1] < right[0] - LOST


def teacher_shortens(f: Facts) -> bool:
    """Completions collapse under the teacher, and fewer answers are right: ending at once is what costs least per token.

    **Recognised**: after at least {STEPS} logged steps completions are shorter than {SHRUNK:g} of those of the first quarter, and the
    share of right answers is lower.

    **Change**: the whole distribution (`grpo.teacher.loss: full`) teaches when to go on; or a smaller learning rate.
    """
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


RULES = (
    make_rule(
        teacher_knows_nothing,
        2,
        facts="teacher/log_prob teacher/reverse_kl accuracy_by_step",
        says="The teacher finds what the student writes unlikely, and that does not change: it does not know the task or the prompt format.",
        change={"grpo.teacher": None},
        explains="teacher_is_worse teacher_kl_rises learning_rate_too_large entropy_collapse all_wrong nothing_answered unparseable "
        "truncated kl_blow_up",
        samples="any",
    ),
    make_rule(
        teacher_is_worse,
        2,
        facts="rewards/correct/mean teacher/reverse_kl",
        says="The student comes closer to its teacher and solves less: on these problems the teacher is the worse of the two.",
        change={"grpo.teacher": None},
    ),
    make_rule(
        teacher_kl_rises,
        2,
        facts="teacher/reverse_kl",
        says="The student goes away from its teacher.",
        change={"grpo.learning_rate": _slower},
        example="grpo.learning_rate=1.0e-4",
    ),
    make_rule(
        teacher_shortens,
        2,
        facts="completions/mean_length rewards/correct/mean",
        says="Completions collapse under the teacher, and fewer answers are right.",
        change={
            "grpo.teacher.loss": lambda f: "full" if f.get("grpo.teacher.loss") == "sampled" else None,
            "grpo.learning_rate": lambda f: _slower(f) if f.get("grpo.teacher.loss") != "sampled" else None,
        },
        explains="teacher_is_worse",
        samples="any",
    ),
)
