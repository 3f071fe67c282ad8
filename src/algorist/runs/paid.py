"""Demonstrations that the recipe's own rewards pay: what is taught is what is rewarded later."""

from __future__ import annotations

import logging
from typing import Any

from algorist.config.schema import Recipe
from algorist.data.problems import Problems, fitting_demonstrations
from algorist.errors import DataError
from algorist.prompts import PromptFormat
from algorist.rewards import RewardSet
from algorist.types import Group, Problem, Rollout

log = logging.getLogger("algorist.runs.paid")


def with_paid_demonstrations(
    recipe: Recipe, problems: Problems, rewards: RewardSet, form: PromptFormat
) -> Problems:
    """Leave out demonstrations to which a reward that reads the gold answer pays its least, where ``correct_only`` asks for right ones.

    Raises:
        DataError: None is left.
    """
    asking = RewardSet(r for r in rewards if r.needs_gold and r.weight and not r.needs_trainer)
    if not (recipe.data.sft or recipe.data.train).correct_only or not problems.sft or not asking:
        return problems
    groups = []
    for p in problems.sft:
        text = str(p.extra.get("response", ""))
        if recipe.sft.source == "problems":
            text = form.demonstrate(p.solution, p.extra.get("demonstrated_answer", p.answer))
        groups.append(Group(p, p.question, [], [Rollout([], text, None, False, form.parse(text))]))
    lows = {reward.name: reward.low for reward in asking}
    paid = [
        group.problem
        for group in asking.pay(groups)
        if all(v is None or v > lows[name] for name, v in group.rollouts[0].rewards.items())
    ]
    if len(paid) < len(problems.sft):
        said = f"correct_only: {len(problems.sft) - len(paid)} of {len(problems.sft)} right demonstrations are paid nothing by"
        text = f"{said} {', '.join(asking.names)}, and left out"
        if not paid:
            raise DataError(
                f"{text}: none remains. See why: algorist rewards explain --recipe RECIPE --completion TEXT --answer GOLD; or leave "
                "correct_only out"
            )
        log.warning("%s", text)
    return Problems(problems.train, paid, problems.held_out, problems.notes)


def fitting_and_paid(
    recipe: Recipe, demonstrations: list[Problem], rewards: RewardSet, form: PromptFormat, tokenizer: Any
) -> list[Problem]:
    """Return the demonstrations whose prompts pass the length filters and which the rewards pay: before a limit, a filter brings in others."""
    section = recipe.data.sft or recipe.data.train
    fitting = fitting_demonstrations(recipe, demonstrations, form, tokenizer)
    if section.max_prompt_percentile is None and section.max_prompt_tokens is None:
        return fitting
    return with_paid_demonstrations(recipe, Problems([], fitting, []), rewards, form).sft
