"""From what the preflight found to lines of YAML: each advice says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from algorist.config.schema import Recipe
from algorist.diagnosis.findings import Settings

if TYPE_CHECKING:
    from algorist.preflight.run import Preflight

FEW_USEFUL = 0.3
"""Below this share of useful groups most of the sampling is wasted."""
MANY_TRUNCATED = 0.3
NEAR_LIMIT = 0.9
"""Share of the memory from which on a run is at risk."""


def advise(recipe: Recipe, found: Preflight) -> list[dict[str, str]]:
    """Return advice as ``why`` and ``change`` (YAML), the gravest first; empty when nothing is wrong."""
    settings = Settings(recipe.model_dump())
    return [
        *_memory(recipe, found, settings),
        *_lengths(recipe, found, settings),
        *_grading(found),
        *_groups(recipe, found, settings),
    ]


def _memory(recipe: Recipe, found: Preflight, settings: Settings) -> list[dict[str, str]]:
    told = []
    for stage, section in (("sft", recipe.sft), ("grpo", recipe.grpo)):
        tried: dict[str, Any] | None = getattr(found, stage)
        if not tried or not found.memory_limit:
            continue
        need = max(tried["memory"]["peak"], tried["memory"]["measured_peak"])
        if need > NEAR_LIMIT * found.memory_limit and section.batch_size > 1:
            half = section.batch_size // 2
            change = settings.change(
                **{
                    f"{stage}__batch_size": half,
                    f"{stage}__gradient_accumulation_steps": 2 * section.gradient_accumulation_steps,
                }
            )
            why = f"{stage} needs {need / 1e9:.1f} of {found.memory_limit / 1e9:.1f} GB; the same step in halves needs less"
            told.append({"why": why, "change": change})
    return told


def _lengths(recipe: Recipe, found: Preflight, settings: Settings) -> list[dict[str, str]]:
    told = []
    limit = recipe.grpo.max_completion_tokens
    if found.prompts.get("do_not_fit"):
        room = found.prompts["context"] - limit
        told.append(
            {
                "why": f"{found.prompts['do_not_fit']} of {found.prompts['looked_at']} prompts leave no room for {limit} "
                f"tokens in the context of {found.prompts['context']}",
                "change": settings.change(data__train__max_prompt_tokens=max(1, room)),
            }
        )
    if found.sampling.get("truncated", 0) > MANY_TRUNCATED and not recipe.sft.enabled:
        told.append(
            {
                "why": f"{found.sampling['truncated']:.0%} of the completions are cut off at {limit} tokens",
                "change": settings.change(grpo__max_completion_tokens=2 * limit),
            }
        )
    if found.sampling.get("end_of_turn_as_text", 0) > 0.1:
        told.append(
            {
                "why": f"{found.sampling['end_of_turn_as_text']:.0%} of the completions show an end-of-turn token as text: the "
                "chat template and the tokenizer's eos_token do not belong together",
                "change": settings.change(model__chat_template="chatml.jinja"),
            }
        )
    return told


def _grading(found: Preflight) -> list[dict[str, str]]:
    if found.golds.get("readable_share", 1.0) >= 0.99:
        return []
    return [
        {
            "why": f"{1 - found.golds['readable_share']:.1%} of the gold answers cannot be read, such as "
            f"{found.golds['unreadable'][0]}; they are never paid",
            "change": "data:\n  train:\n    numeric_answers_only: true",
        }
    ]


def _groups(recipe: Recipe, found: Preflight, settings: Settings) -> list[dict[str, str]]:
    shares = found.sampling.get("useful_share")
    if not shares or recipe.sft.enabled:  # before SFT a model from scratch or a base model knows no format
        return []
    size = recipe.grpo.group_size
    nearest = min(shares, key=lambda g: abs(int(g) - size))
    if shares[nearest] >= FEW_USEFUL:
        return []
    larger = max(shares, key=lambda g: shares[g])
    rate = found.sampling["pass_rate"]
    if shares[larger] < FEW_USEFUL and rate < 0.05:
        change = settings.change(sft__enabled=True)
        why = "hardly any completion is right: teach the format first, or take easier problems"
    elif rate > 0.9:
        change = settings.change(grpo__temperature=1.2)
        why = "nearly every completion is right: take harder problems"
    else:
        per = recipe.grpo.batch_size * recipe.grpo.gradient_accumulation_steps
        times = max(1, -(-int(larger) // per)) if per % int(larger) else 1
        change = settings.change(
            grpo__group_size=int(larger),
            grpo__gradient_accumulation_steps=recipe.grpo.gradient_accumulation_steps * times,
        )
        why = f"groups of {larger} differ in {shares[larger]:.0%} of the problems"
    return [
        {"why": f"only {shares[nearest]:.0%} of groups of {nearest} would be useful; {why}", "change": change}
    ]
