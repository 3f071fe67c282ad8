"""Is this a teacher? Before a run: is it better than the student on the recipe's problems, and do both think alike?

What a student can take over is what the teacher does at likely tokens that both share: where distillation on one's own samples works, 97
to 99 % of the mass lies on tokens that are likely for both. Source: 2604.13016.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from algorist.evaluation.estimators import Interval, paired_difference
from algorist.extensions.teacher import BASE, TeacherSection
from algorist.extensions.teacher.divergence import top_of
from algorist.extensions.teacher.remote import load_teacher, remote_of
from algorist.rollouts import make_engine
from algorist.rollouts.collect import collect
from algorist.training.batch import Batch
from algorist.training.grpo_setup import sampling_params
from algorist.training.log_probs import LogProbs

LIKELY = 8
"""Tokens that count as likely."""
SHARED = 0.9
"""Below this share of the teacher's mass on the student's likely tokens the two think too differently."""
PART = 16
"""Completions of one forward."""


def preview(recipe: Any, look: Any) -> dict[str, Any] | None:
    """Return what a look at the teacher shows: numbers, rows of the table, advice.

    Args:
        recipe: The resolved recipe.
        look: ``preflight.completions.Look``: the student, and what it solved.
    """
    section: TeacherSection = recipe.grpo.teacher
    if section.model == BASE:
        return {
            "rows": {"teacher": "the base of the adapter; a fresh adapter computes as its base"},
            "advice": [],
        }
    student = look.policy
    if remote_of(section) is not None:
        line = (
            load_teacher(section, student.model, student.tokenizer, like=recipe.model)
            .line()
            .removeprefix("teacher ")
        )
        return {"rows": {"teacher": f"{line}; its own accuracy is not measured from here"}, "advice": []}
    look.say(f"sampling from the teacher {section.model}")
    teacher = load_teacher(section, student.model, student.tokenizer, like=recipe.model)
    with teacher.awake():
        groups = collect(
            make_engine("auto", teacher.model, student.tokenizer),
            student.tokenizer,
            look.problems,
            look.form,
            sampling_params(recipe.grpo, recipe.seed),
            look.samples,
            matcher=recipe.matcher,
        )
    rates = [
        sum(bool(r.grade and r.grade.correct) for r in group.rollouts) / look.samples for group in groups
    ]
    own = [look.rates[group.problem.id] for group in groups]
    rollouts = sum(len(group.rollouts) for group in groups)
    batch = Batch.from_groups(groups, torch.zeros(rollouts))
    with teacher.awake():
        theirs = _read(teacher.model, batch.to(teacher.device), teacher.rows, recipe.grpo.temperature)
    ours = _read(student.model, batch.to(look.device), teacher.rows, recipe.grpo.temperature)
    shared = _shared(ours[1], theirs[1])[batch.mask].mean()
    numbers = {
        "problems": len(groups),
        "samples": look.samples,
        "student": sum(own) / len(own),
        "teacher": sum(rates) / len(rates),
        "difference": asdict(gap := paired_difference(own, rates)),
        "student_log_prob": float(ours[0][batch.mask].mean()),
        "teacher_log_prob": float(theirs[0][batch.mask].mean()),
        "shared_mass": float(shared),
        "before_sft": bool(look.sft),
    }
    return {**numbers, "rows": _rows(numbers, gap), "advice": _advice(section, numbers, gap)}


@torch.no_grad()
def _read(model: Any, batch: Batch, rows: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return a model's log-probs (B, T) of completions, and its likely tokens (B, T, 2 + 2·LIKELY), on the CPU."""
    model.eval()
    log_probs = LogProbs(temperature=temperature)
    values = torch.zeros(len(batch), batch.width)
    tops = torch.zeros(len(batch), batch.width, 2 + 2 * LIKELY)
    order = batch.in_group_order(range(len(batch)))
    for start in range(0, len(order), PART):
        part = order[start : start + PART]
        piece = batch.take(part)
        of_part, _ = log_probs(model, piece, of_head={"top": lambda at: top_of(at, LIKELY, rows)})
        values[part, : piece.width] = of_part.float().cpu()
        tops[part, : piece.width] = piece.extra["top"].cpu()
    return values, tops


def _shared(student: Tensor, teacher: Tensor) -> Tensor:
    """Return (B, T): the share of the teacher's mass on its likely tokens that are likely for the student too."""
    ids, theirs = student[..., 2 : 2 + LIKELY], teacher[..., 2 : 2 + LIKELY]
    both = (theirs[..., :, None] == ids[..., None, :]).any(-1)
    mass = teacher[..., 2 + LIKELY :].exp()
    return (mass * both).sum(-1) / mass.sum(-1)


def _rows(n: dict[str, Any], gap: Interval) -> dict[str, str]:
    return {
        "teacher": (
            f"right {n['teacher']:.1%}, the student {n['student']:.1%} of {n['problems']} problems × {n['samples']}; paired difference "
            f"{100 * gap.value:+.1f} points [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]"
        ),
        "its completions": (
            f"{n['teacher_log_prob']:.2f} nats a token for itself, {n['student_log_prob']:.2f} for the student; {n['shared_mass']:.0%} of its "
            f"mass on the student's {LIKELY} likeliest tokens"
        ),
    }


def _advice(section: TeacherSection, n: dict[str, Any], gap: Interval) -> list[dict[str, str]]:
    if n["before_sft"]:
        return []  # the student of GRPO is what SFT makes
    advice = []
    other = "grpo:\n  teacher:\n    model: NAME  # a stronger model of the student's family"
    interval = f"{100 * gap.value:+.1f} points [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]"
    if gap.high <= 0 or n["teacher"] <= n["student"]:
        advice.append(
            {
                "why": f"the teacher {section.model} solves no more of these problems than the student ({interval}): there is nothing to learn "
                "from it here",
                "change": other,
            }
        )
    elif gap.low <= 0:
        advice.append(
            {
                "why": f"the teacher {section.model} may be no better than the student: {interval}. Look at more problems: --problems "
                f"{4 * n['problems']} --minutes 5",
                "change": other,
            }
        )
    if n["shared_mass"] < SHARED:
        advice.append(
            {
                "why": f"only {n['shared_mass']:.0%} of the teacher's mass lies on tokens that are likely for the student, so scores of the "
                "student's own completions teach little. First SFT on the teacher's completions: algorist data sample RECIPE --model "
                f"{section.model} --out taught.jsonl",
                "change": "sft:\n  enabled: true\ndata:\n  sft: {name: local, path: taught.jsonl}",
            }
        )
    return advice
