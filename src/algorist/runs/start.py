"""What model, tokenizer and problems show together before the first step: refusals, and the rules that preflight has too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from algorist.data.problems import prompts_beyond, refuse_beyond_context
from algorist.diagnosis.rule import Facts, Finding, apply
from algorist.diagnosis.rules import all_rules
from algorist.diagnosis.settings import Settings
from algorist.diagnosis.tokenization import tokenization_facts
from algorist.models.modes import context_of
from algorist.training.grpo_setup import check_enough_problems
from algorist.training.training_arguments import grpo_steps, sft_steps
from algorist.types import Problem

if TYPE_CHECKING:
    from algorist.models.load import Policy
    from algorist.runs.plan import Plan


def check_start(
    plan: Plan, policy: Policy, train: Sequence[Problem], sft: Sequence[Problem], held_out: Sequence[Problem]
) -> list[str]:
    """Refuse what would fail after hours, and return a line for each rule that is broken.

    Raises:
        ConfigError: Prompts that fill the context, or fewer problems than a rollout batch takes.
    """
    recipe, form, tokenizer = plan.recipe, plan.form, policy.tokenizer
    context, room = context_of(policy.model), 0
    facts: dict[str, Any] = {"context": context, "looked_at": len(train)}
    if recipe.eval.enabled:
        refuse_beyond_context("eval", held_out, form, tokenizer, context)
    if plan.trains("grpo"):
        refuse_beyond_context("train", train, form, tokenizer, context)
        check_enough_problems(len(train), recipe.grpo)
        if context and (room := context - recipe.grpo.max_completion_tokens) > 0:
            facts["do_not_fit"] = len(prompts_beyond(room, train, form, tokenizer))
    rendered = sft if plan.trains("sft") and recipe.sft.source == "problems" else ()
    facts |= tokenization_facts(policy, form, train, demonstrations=rendered)
    rules = [rule for rule in all_rules().values() if rule.room == "start"]
    settings = Settings(recipe.model_dump())
    steps = {"sft": sft_steps(recipe.sft, len(sft)), "grpo": grpo_steps(recipe.grpo, len(train))}
    views = [Facts(settings, {**facts, "steps": steps[s]}, stage=s) for s in steps if plan.trains(s)]
    return [_line(finding) for finding in apply(rules, *views)]


def _line(finding: Finding) -> str:
    change = f" · change: {' '.join(finding.change)}" if finding.change else ""
    return f"warning: {finding.one_line()}{change}"
