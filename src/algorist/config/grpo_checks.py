"""Checks of the ``grpo`` section that take more than one key, and its former names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from algorist.errors import nearest
from algorist.objectives import ADVANTAGES, LOSSES

if TYPE_CHECKING:
    from algorist.config.schema import GRPOSection


def with_names_of_now(given: Any) -> Any:
    """Take ``loss_type`` and ``scale_rewards``, TRL's names and those of former recipes."""
    if not isinstance(given, dict):
        return given
    given = dict(given)
    if "loss_type" in given:
        given["loss"] = given.pop("loss_type")
    scale = given.pop("scale_rewards", None)
    if scale is not None:
        known = {"group": "group_normalized", "batch": "batch_normalized", "none": "group_centered"}
        names = known | {True: "group_normalized", False: "group_centered"}
        if scale not in names:
            raise ValueError(
                f"grpo.scale_rewards is '{scale}'; expected group, batch or none, which are grpo.advantage="
                + ", ".join(known.values())
            )
        given["advantage"] = names[scale]
    return given


def check_grpo(section: GRPOSection) -> GRPOSection:
    """Return the section; refuse combinations that cannot be trained (ValueError)."""
    for key, registry in (("loss", LOSSES), ("advantage", ADVANTAGES)):
        name = getattr(section, key)
        if ".py:" not in name and name not in registry:
            raise ValueError(
                f"grpo.{key} is '{name}'.{nearest(name, registry.names())} Expected one of {', '.join(registry.names())}, "
                "or a function of your own as file.py:function"
            )
    if section.group_size == 1:
        raise ValueError(
            "grpo.group_size is 1: the advantage of a group of one is always 0, so nothing is learned; take 8 "
            "(grpo.group_size=8), at least 2"
        )
    replaces = "resample" if section.resample else "replay" if section.replay else ""
    if replaces and section.advantage == "reinforce_plus_plus":
        raise ValueError(
            f"grpo.{replaces} replaces groups of equal rewards, but these teach under grpo.advantage=reinforce_plus_plus; leave "
            f"grpo.{replaces} out, or take grpo.advantage=reinforce_plus_plus_baseline"
        )
    if not section.fast_update:
        check_stock(section)
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


def check_stock(section: GRPOSection) -> None:
    """Refuse what is only in our own step (ValueError)."""
    extras = [key for key in ("resample", "replay", "pools", "entropy_bonus") if getattr(section, key)]
    extras += ["top_entropy_share"] if section.top_entropy_share < 1 else []
    if extras:
        raise ValueError(
            f"grpo.{extras[0]} is set, which the stock TRL trainer does not get (grpo.fast_update=false, or TRL's own vLLM); leave it "
            "out, or take grpo.fast_update=true and an engine of ours"
        )
