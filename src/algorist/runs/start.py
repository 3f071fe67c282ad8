"""Checks of model, tokenizer and problems together before the first step: refusals. The rules are the extension ``live``'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from algorist.data.problems import refuse_beyond_context
from algorist.models.modes import context_of
from algorist.training.grpo_setup import check_enough_problems
from algorist.types import Problem

if TYPE_CHECKING:
    from algorist.models.load import Policy
    from algorist.runs.plan import Plan


def check_start(plan: Plan, policy: Policy, train: Sequence[Problem], held_out: Sequence[Problem]) -> None:
    """Refuse runs that would fail after hours.

    Raises:
        ConfigError: Prompts that fill the context, or fewer problems than a rollout batch takes.
    """
    form, tokenizer, context = plan.form, policy.tokenizer, context_of(policy.model)
    if plan.recipe.eval.enabled:
        refuse_beyond_context("eval", held_out, form, tokenizer, context)
    if plan.trains("grpo"):
        refuse_beyond_context("train", train, form, tokenizer, context)
        check_enough_problems(len(train), plan.recipe.grpo)
