"""Is this a teacher? Before a run: is it better than the student on the recipe's problems, and do both think alike?

What a student can take over is what the teacher does at likely tokens that both share: where distillation on one's own samples works, 97
to 99 % of the mass lies on tokens that are likely for both. Source: 2604.13016.
"""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from algorist.evaluation.estimators import Interval, paired_rate_difference
from algorist.extensions.teacher import BASE, WORDS
from algorist.extensions.teacher.model import Teacher
from algorist.extensions.teacher.remote import load_teacher, remote_of
from algorist.preflight.completions import sample
from algorist.training.batch import Batch

LIKELY = 8
"""Tokens that count as likely."""
SHARED = 0.9
"""Below this share of the teacher's mass on the student's likely tokens the two think too differently."""


def preview(recipe: Any, look: Any) -> dict[str, Any] | None:
    """Preview the teacher: numbers, rows of the table, advice.

    Args:
        recipe: The resolved recipe.
        look: ``preflight.completions.Look``: the student, and what it solved.
    """
    section, student = recipe.grpo.teacher, look.policy
    if section.model == BASE:
        return {"rows": {"teacher": WORDS["base"]}, "advice": []}
    look.say(f"asking the teacher {section.model}")
    teacher = load_teacher(section, student.model, student.tokenizer, like=recipe.model)
    if remote_of(section) is not None:
        return {"rows": {"teacher": teacher.line() + WORDS["served"]}, "advice": []}
    with teacher.awake():
        policy = SimpleNamespace(model=teacher.model, tokenizer=student.tokenizer)
        facts, groups = sample(look.plan, look.problems, policy, look.samples)  # type: ignore[arg-type]
        batch = Batch.from_groups(groups, torch.zeros(sum(len(group.rollouts) for group in groups)))

        def read(model: Any, device: torch.device) -> Tensor:
            whole = Teacher("", model, device, teacher.rows, temperature=recipe.grpo.temperature)
            return whole.top(batch, look, LIKELY)[batch.mask].cpu()

        theirs, ours = read(teacher.model, teacher.device), read(student.model.eval(), look.plan.device)
    ids = [group.problem.id for group in groups]
    rates, own = ([of[problem] for problem in ids] for of in (facts["per_problem"], look.rates))
    numbers = {
        "problems": len(groups),
        "samples": look.samples,
        "student": sum(own) / len(own),
        "teacher": sum(rates) / len(rates),
        "difference": asdict(gap := paired_rate_difference(own, rates)),
        "student_log_prob": float(ours[:, 1].mean()),
        "teacher_log_prob": float(theirs[:, 1].mean()),
        "shared_mass": float(_shared(ours, theirs).mean()),
        "before_sft": bool(look.sft),
    }
    return numbers | _said(section, numbers, gap)


def _shared(student: Tensor, teacher: Tensor) -> Tensor:
    """Return (N,): the share of the teacher's mass on its likely tokens that are likely for the student too."""
    ids, theirs = student[:, 2 : 2 + LIKELY], teacher[:, 2 : 2 + LIKELY]
    both = (theirs[:, :, None] == ids[:, None, :]).any(-1)
    mass = teacher[:, 2 + LIKELY :].exp()
    return (mass * both).sum(-1) / mass.sum(-1)


def _said(section: Any, n: dict[str, Any], gap: Interval) -> dict[str, Any]:
    """Return rows and advice; none of the latter for a student that SFT will change first."""
    points = f"{100 * gap.value:+.1f} points [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]"
    values = {**n, "section": section, "likely": LIKELY, "interval": points, "more": 4 * n["problems"]}
    rows = {"teacher": "accuracy", "its completions": "completions"}
    worse = gap.high <= 0 or n["teacher"] <= n["student"]
    cases = {
        "nothing_to_learn": ("another_teacher", worse),
        "unsure": ("another_teacher", gap.low <= 0 and not worse),
        "too_different": ("first_its_texts", n["shared_mass"] < SHARED),
    }
    advice = [
        {"why": WORDS[case].format(**values), "change": WORDS[change]}
        for case, (change, holds) in cases.items()
        if holds and not n["before_sft"]
    ]
    return {"rows": {title: WORDS[row].format(**values) for title, row in rows.items()}, "advice": advice}
