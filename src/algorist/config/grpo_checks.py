"""Checks of the ``grpo`` section that take more than one key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from algorist.config.presets import preset_names
from algorist.errors import nearest
from algorist.objectives import ADVANTAGES

if TYPE_CHECKING:
    from algorist.config.schema import GRPOSection


def no_empty_stop_string(section: str) -> Callable[[list[str] | None], list[str] | None]:
    """Return the check of ``SECTION.stop_strings``, which refuses an empty text (ValueError)."""

    def check(texts: list[str] | None) -> list[str] | None:
        if "" in (texts or ()):
            raise ValueError(
                f"{section}.stop_strings has an empty text, which would end every completion at once; take it out, or write "
                f"for example {section}.stop_strings=['</answer>']"
            )
        return texts

    return check


def check_grpo(section: GRPOSection) -> GRPOSection:
    """Return the section; refuse combinations that cannot be trained (ValueError)."""
    if section.preset is not None and section.preset not in preset_names():
        raise ValueError(
            f"grpo.preset is '{section.preset}'.{nearest(section.preset, preset_names())} Expected one of "
            f"{', '.join(preset_names())}; algorist recipes presets shows their lines"
        )
    if ".py:" not in section.advantage and section.advantage not in ADVANTAGES:
        raise ValueError(
            f"grpo.advantage is '{section.advantage}'.{nearest(section.advantage, ADVANTAGES)} Expected one of "
            f"{', '.join(ADVANTAGES)}, or a function of your own as file.py:function"
        )
    if section.group_size == 1:
        raise ValueError(
            "grpo.group_size is 1: the advantage of a group of one is always 0, so nothing is learned; take 8 "
            "(grpo.group_size=8), at least 2"
        )
    per_micro, shared, factor = section.batch_size * section.processes, "", ""
    if section.processes > 1:
        shared, factor = " × processes", f" × {section.processes}"
    per_step = per_micro * section.gradient_accumulation_steps
    if per_step % section.group_size:
        fits = [k for k in range(2, min(per_step, 10_000) + 1) if per_step % k == 0]
        need = section.group_size // math.gcd(per_micro, section.group_size)
        raise ValueError(
            f"grpo.batch_size × grpo.gradient_accumulation_steps{shared} = {section.batch_size} × "
            f"{section.gradient_accumulation_steps}{factor} = {per_step} completions per step, not divisible by "
            f"grpo.group_size = {section.group_size}; take grpo.gradient_accumulation_steps={need}, or "
            f"grpo.group_size={min(fits, key=lambda k: abs(k - section.group_size), default=2)}"
        )
    generation = per_micro * (section.steps_per_generation or section.gradient_accumulation_steps)
    if generation % section.group_size:
        raise ValueError(
            f"grpo.batch_size × grpo.steps_per_generation{shared} = {generation} completions per rollout batch, not "
            f"divisible by grpo.group_size = {section.group_size}; leave grpo.steps_per_generation out"
        )
    if section.steps_per_generation and section.steps_per_generation % section.gradient_accumulation_steps:
        raise ValueError(
            f"grpo.steps_per_generation is {section.steps_per_generation}, no multiple of grpo.gradient_accumulation_steps = "
            f"{section.gradient_accumulation_steps}; a rollout batch feeds whole steps: leave steps_per_generation out for one "
            f"step, or take {2 * section.gradient_accumulation_steps} for two"
        )
    return section
