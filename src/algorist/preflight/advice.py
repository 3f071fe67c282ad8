"""From what the preflight found to lines of YAML: each advice says why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from algorist.config.schema import Recipe
from algorist.diagnosis.causes_rollouts import COPIES, END_SHOWN, MOSTLY, NEARLY_ALL, sample_more_freely
from algorist.diagnosis.findings import Settings
from algorist.preflight.memory_advice import ROOM
from algorist.training.faults import smaller_batch

if TYPE_CHECKING:
    from algorist.preflight.run import Preflight

FEW_USEFUL = 0.3
"""Below this share of useful groups most of the sampling is wasted."""
MANY_TRUNCATED = 0.3
ENOUGH_ENDED = 12
"""Completions that must have ended by themselves before missing tags are the model's and not the limit's doing."""
Advice = Iterable[tuple[str, str]]


def advise(recipe: Recipe, found: Preflight) -> list[dict[str, str]]:
    """Return advice as ``why`` and ``change`` (YAML), the gravest first; empty when nothing is wrong."""
    settings = Settings(recipe.model_dump())
    parts = (
        _memory(recipe, found, settings),
        ((fault["why"], fault["change"]) for fault in found.tokenization),
        _rewards(found),
        _lengths(recipe, found, settings),
        _grading(found),
        _tags(recipe, found, settings),
        _variety(recipe, found, settings),
        _groups(recipe, found, settings),
        ((item["why"], item["change"]) for seen in found.extensions.values() for item in seen["advice"]),
    )
    return [{"why": why, "change": change} for part in parts for why, change in part]


def _memory(recipe: Recipe, found: Preflight, settings: Settings) -> Advice:
    """Return what ``memory_steps`` planned; where only the measured peak is too high, a smaller batch."""
    for stage, section in (("sft", recipe.sft), ("grpo", recipe.grpo)):
        for step in found.planned.get(stage, []):
            yield step["why"], step["change"]
        tried: dict[str, Any] | None = getattr(found, stage)
        if not tried or stage in found.planned:
            continue
        need = max(tried["memory"]["peak"], tried["memory"]["measured_peak"])
        if need > ROOM * found.memory_limit and section.batch_size > 1:
            smaller = {f"{stage}__{name}": value for name, value in smaller_batch(section).items()}
            yield (
                f"{stage} needs {need / 1e9:.1f} of {found.memory_limit / 1e9:.1f} GB; the same step in halves needs less",
                settings.change(**smaller),
            )


def before_sft(recipe: Recipe, found: Preflight) -> bool:
    """Return whether SFT is still to come: before it a model from scratch or a base model knows no format."""
    return recipe.sft.enabled and found.model is None


def more_sft(recipe: Recipe, settings: Settings) -> str:
    """Return the change for SFT where there was none, or for twice as much of it."""
    if not recipe.sft.enabled:
        return settings.change(sft__enabled=True)
    if recipe.sft.max_steps:
        return settings.change(sft__max_steps=2 * recipe.sft.max_steps)
    return settings.change(sft__epochs=2 * recipe.sft.epochs)


def _rewards(found: Preflight) -> Advice:
    change = (
        "rewards:  # correct the function; try it: algorist rewards explain --completion TEXT --answer GOLD "
        "--recipe RECIPE\n  - {name: correct, weight: 1.0}"
    )
    for name, reward in found.sampling.get("rewards", {}).items():
        if reward["hangs"]:
            yield f"reward '{name}' hangs: {reward['first_failure']}", change
        elif reward["failures"]:
            yield (
                f"reward '{name}' failed on {reward['failures']} of {reward['completions']} completions "
                f"({reward['first_failure']}); they get {reward['low']:g}",
                change,
            )


def _tags(recipe: Recipe, found: Preflight, settings: Settings) -> Advice:
    tags = found.sampling.get("tags", {})
    rare = ", ".join(f"{tag} {share:.0%}" for tag, share in tags.items() if share < 1 - MOSTLY)
    if rare and found.sampling["ended"] >= ENOUGH_ENDED and not before_sft(recipe, found):
        yield (
            f"tags of the prompt format are missing in completions that ended: {rare} of {found.sampling['ended']}; "
            "teach the format, reward it, or take a format that the model knows",
            more_sft(recipe, settings)
            + "\nrewards:\n  - {name: correct, weight: 1.0}\n  - {name: well_formed, weight: 0.5}",
        )


def _variety(recipe: Recipe, found: Preflight, settings: Settings) -> Advice:
    sampled = found.sampling
    if sampled.get("identical_groups", 0) >= COPIES and sampled["pass_rate"] <= NEARLY_ALL:
        yield (
            f"{sampled['identical_groups']:.0%} of the groups hold one text {sampled['samples']} times at temperature "
            f"{recipe.grpo.temperature:g}: nothing in them can be compared; sample more freely",
            sample_more_freely(settings),
        )
    if sampled.get("broken_characters", 0) > END_SHOWN and not before_sft(recipe, found):
        yield (
            f"{sampled['broken_characters']:.0%} of the completions hold bytes that are no character: the model is "
            "untrained or sampled too freely, or weights and tokenizer do not belong together",
            settings.change(grpo__temperature=0.7),
        )


def _lengths(recipe: Recipe, found: Preflight, settings: Settings) -> Advice:
    prompts, sampled, limit = found.prompts, found.sampling, recipe.grpo.max_completion_tokens
    if prompts.get("do_not_fit"):
        yield (
            f"{prompts['do_not_fit']} of {prompts['looked_at']} prompts leave no room for {limit} "
            f"tokens in the context of {prompts['context']}",
            settings.change(data__train__max_prompt_tokens=max(1, prompts["context"] - limit)),
        )
    if sampled.get("truncated", 0) > MANY_TRUNCATED and not before_sft(recipe, found):
        yield (
            f"{sampled['truncated']:.0%} of the completions are cut off at {limit} tokens",
            settings.change(grpo__max_completion_tokens=2 * limit),
        )
    if sampled.get("end_of_turn_as_text", 0) > END_SHOWN:
        yield (
            f"{sampled['end_of_turn_as_text']:.0%} of the completions show an end-of-turn token as text: the "
            "chat template and the tokenizer's eos_token do not belong together",
            settings.change(model__chat_template="chatml.jinja"),
        )


def _grading(found: Preflight) -> Advice:
    if found.golds.get("readable_share", 1.0) < 0.99:
        yield (
            f"{1 - found.golds['readable_share']:.1%} of the gold answers cannot be read, such as "
            f"{found.golds['unreadable'][0]}; they are never paid",
            "data:\n  train:\n    numeric_answers_only: true",
        )


def _groups(recipe: Recipe, found: Preflight, settings: Settings) -> Advice:
    shares = found.sampling.get("useful_share")
    if not shares or before_sft(recipe, found):
        return
    size = recipe.grpo.group_size
    nearest = min(shares, key=lambda g: abs(int(g) - size))
    if shares[nearest] >= FEW_USEFUL:
        return
    larger = max(shares, key=lambda g: shares[g])
    rate = found.sampling["pass_rate"]
    if shares[larger] < FEW_USEFUL and rate < 0.05:
        change = more_sft(recipe, settings)
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
    yield f"only {shares[nearest]:.0%} of groups of {nearest} would be useful; {why}", change
