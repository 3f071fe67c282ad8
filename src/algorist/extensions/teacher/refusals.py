"""What cannot be learned from, as far as that is known before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from algorist.extensions.teacher import BASE, TeacherSection
from algorist.extensions.teacher.remote import remote_of


def refusals(recipe: Any, plan: Any) -> Iterator[str]:
    """Yield why a plan's teacher cannot be one, or not in this way."""
    section: TeacherSection = recipe.grpo.teacher
    remote = remote_of(section)
    if remote is not None:
        yield from remote.refusals(recipe)
    if section.model == BASE and recipe.model.lora is None:
        yield (
            "grpo.teacher.model is base, the base of the student's adapter, but model.lora is not set; name a model, or take "
            "model.lora={rank: 16}"
        )
    elsewhere = "grpo.teacher.quantization" if section.quantization else "grpo.teacher.device"
    if section.model == BASE and (section.quantization or section.device != "same"):
        yield f"grpo.teacher.model is base, which computes inside the student, so {elsewhere} says nothing of it; leave it out"
    elif section.device == "swap" and section.quantization:
        yield (
            f"grpo.teacher.device=swap cannot move a teacher in {section.quantization}, which bitsandbytes holds on its GPU; leave out one "
            "of the two"
        )
    elif section.device == "swap" and plan.device.type == "cpu":
        yield (
            "grpo.teacher.device=swap keeps the teacher in the host's memory until it scores on the student's GPU, but this run "
            "computes on the CPU; leave device out"
        )
    if section.model == "tiny":
        yield "grpo.teacher.model is tiny: made from scratch, it has nothing to teach; name a trained model or a run"
    folder = Path(section.model).expanduser()
    looks_local = (
        folder.is_absolute() or section.model.startswith((".", "runs/")) or section.model.count("/") > 1
    )
    if section.model != BASE and remote is None and looks_local and not folder.exists():
        yield f"grpo.teacher.model: there is no {folder}. Train it first, or name another model"
    if section.loss == "sampled" and section.beta != 1:
        yield (
            f"grpo.teacher.beta is {section.beta:g}, but loss: sampled is the reverse KL (beta 1) only; take grpo.teacher.loss=full for "
            "the forward KL and the Jensen-Shannon divergence, or leave beta out"
        )
    if section.loss != "top_k" and section.top_k != TeacherSection.model_fields["top_k"].default:
        yield (
            f"grpo.teacher.top_k is read with grpo.teacher.loss=top_k only, but loss is {section.loss}; set that loss, or leave top_k out"
        )
    objective = plan.objective
    if section.loss == "sampled" and objective is not None and objective.loss.importance == "sequence":
        yield (
            f"grpo.loss={recipe.grpo.loss.name} has one ratio for a whole completion, so a teacher's numbers per token would be spread over "
            "all of it; take grpo.teacher.loss=full or top_k, or a loss with ratios per token, such as grpo.loss=dapo"
        )
    for name, does in (
        ("resample", "replaces"),
        ("replay", "replaces"),
        ("drop_equal_groups", "leaves out"),
    ):
        if getattr(recipe.grpo, name, None):
            yield (
                f"grpo.{name} {does} groups of equal rewards, but the teacher teaches on these too; leave grpo.{name} out, or learn from "
                "rewards alone (grpo.teacher=null)"
            )
