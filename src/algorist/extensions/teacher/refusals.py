"""Refusals of a teacher, as far as they are known before a model is loaded; ``words.yaml`` has the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from algorist.extensions.teacher import BASE, WORDS, TeacherSection
from algorist.extensions.teacher.remote import remote_of

EQUAL_GROUPS = {"resample": "replaces", "replay": "replaces", "drop_equal_groups": "leaves out"}
"""Settings that take groups of equal rewards away, and how."""


def refusals(recipe: Any, plan: Any) -> Iterator[str]:
    """Yield the reasons a plan's teacher cannot be one, or not in this way."""
    section: TeacherSection = recipe.grpo.teacher
    remote, base, folder = remote_of(section), section.model == BASE, Path(section.model).expanduser()
    yield from remote.refusals(recipe) if remote is not None else ()
    quantized, swap, sampled = section.quantization, section.device == "swap", section.loss == "sampled"
    on_disk = folder.is_absolute() or section.model.startswith((".", "runs/")) or section.model.count("/") > 1
    cases = {
        "base_without_adapter": base and recipe.model.lora is None,
        "base_elsewhere": base and (quantized or section.device != "same"),
        "swap_of_quantized": swap and not base and quantized,
        "swap_on_the_cpu": swap and not base and not quantized and plan.device.type == "cpu",
        "from_scratch": section.model == "tiny",
        "no_folder": on_disk and not base and remote is None and not folder.exists(),
        "beta_of_sampled": sampled and section.beta != 1,
        "top_k_of_another_loss": section.loss != "top_k"
        and section.top_k != TeacherSection.model_fields["top_k"].default,
        "one_ratio": sampled and plan.objective is not None and plan.objective.loss.importance == "sequence",
    }
    elsewhere = "grpo.teacher.quantization" if quantized else "grpo.teacher.device"
    for case in (name for name, holds in cases.items() if holds):
        yield WORDS[case].format(section=section, recipe=recipe, folder=folder, elsewhere=elsewhere)
    for name, does in EQUAL_GROUPS.items():
        if getattr(recipe.grpo, name, None):
            yield WORDS["equal_groups"].format(name=name, does=does)
