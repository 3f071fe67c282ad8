"""Facts of the preflight; the rules say what is wrong and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from algorist.config.schema import Recipe
from algorist.diagnosis.diagnose import without_solutions
from algorist.diagnosis.facts import ENOUGH, ENOUGH_ENDED
from algorist.diagnosis.rule import Facts, Finding, Share, apply
from algorist.diagnosis.rules import all_rules
from algorist.diagnosis.settings import Settings
from algorist.diagnosis.signals import MIN_GROUPS
from algorist.models.load import pick_device
from algorist.models.precision import on_gpu
from algorist.preflight.time import long_facts
from algorist.store.stages import STAGES

if TYPE_CHECKING:
    from algorist.preflight.run import Preflight

LARGE = 2e8
"""Products of a token of a model for which there is a smaller one that learns without a GPU."""
SHARES = {
    "truncated": "truncated",
    "truncated_so_far": "truncated",
    "truncated_answered": "truncated_answered",
    "end_of_turn": "end_of_turn_as_text",
    "broken_characters": "broken_characters",
}
"""Fact of completions → what ``Sampler.facts`` calls it."""
OF_GROUPS = {"identical": "identical_groups", "pass_rate": "pass_rate"}
AFTER_SFT = (
    "truncated", "truncated_so_far", "finished_unreadable", "stopped", "broken_characters", "useful_here", "all_right", "all_wrong", "unreadable",
)  # fmt: skip
"""Facts that say nothing while SFT is still to come: before it a model from scratch or a base model knows no format."""


def advise(recipe: Recipe, look: Preflight, *, solved: bool) -> list[Finding]:
    """Return the findings of the rules, the most severe first; empty when nothing is wrong.

    Without ``solved`` problems, which SFT imitates, what advises SFT also says how to get solutions.
    """
    settings, common = Settings(recipe.model_dump()), _facts(recipe, look)
    views = [
        Facts(
            settings,
            {
                **common,
                **_memory(look.planned.get(stage, [])),
                "steps": look.batch.get(stage, {}).get("steps"),
            },
            stage=stage,
        )
        for stage in STAGES
    ]
    own = [
        Finding(f"{name}_preview", item["why"], 2, ())
        for name, seen in look.extensions.items()
        for item in seen["advice"]
    ]
    findings = apply(list(all_rules().values()), *views)
    return [*(findings if solved else without_solutions(findings)), *own]


def _memory(steps: list[dict[str, Any]]) -> dict[str, Any]:
    change = {key: value for step in steps for key, value in step["change"].items()}
    return {"memory_steps": [step["why"] for step in steps] or None, "memory_change": change}


def _facts(recipe: Recipe, look: Preflight) -> dict[str, Any]:
    prompts, golds, sampled = look.prompts, look.golds, look.sampling
    facts = {**look.tokenization, "do_not_fit": prompts.get("do_not_fit"), "context": prompts.get("context")}
    facts["longest"] = prompts.get("p100", 0)
    facts |= {"looked_at": prompts.get("looked_at"), "golds_unread": 1 - golds.get("readable_share", 1.0)}
    facts |= {"leaked": look.leaked, "odd_data": prompts.get("odd_data") or {}}
    if look.times:
        large = look.speed["token"] + look.speed["head"] > LARGE
        facts |= long_facts(recipe, look.times, laptop=large and not on_gpu(pick_device(recipe.device)))
    facts["gold_example"] = next(iter(golds.get("unreadable", ())), "")
    if sampled:
        facts |= _sampled_facts(recipe, sampled)
    if recipe.sft.enabled and look.model is None:
        facts = {name: value for name, value in facts.items() if name not in AFTER_SFT}
    return facts


def _sampled_facts(recipe: Recipe, sampled: dict[str, Any]) -> dict[str, Any]:
    count = sampled["problems"] * sampled["samples"]
    facts: dict[str, Any] = {
        "where": f"{sampled['problems']} problems × {sampled['samples']}",
        "reasons": sampled["reasons"],
        "completions": count,
        "silent": sampled["unreadable"],
        "graded": count,
    }
    if count >= ENOUGH_ENDED:
        facts |= {name: Share(sampled[key]) for name, key in SHARES.items()}
        facts |= {"stopped": Share(sampled["stopped"]), "same_number": sampled["same_number"]}
        facts["misjudged"] = Share(sampled["same_number_wrong"] / max(1, sampled["same_number"]))
    if count >= ENOUGH:
        facts["unreadable"] = Share(sampled["unreadable"] / count)
    if sampled["ended"] >= ENOUGH_ENDED:
        facts["finished_unreadable"] = Share(sampled["ended_unreadable"] / sampled["ended"])
        facts["tags"] = {tag: f"{share:.0%}" for tag, share in sampled["tags"].items()}
    if sampled["judged"]:
        shares, size = sampled["useful_share"], recipe.grpo.group_size
        nearest = min(shares, key=lambda g: abs(int(g) - size))
        facts |= {"useful_share": shares, "useful_here": (nearest, shares[nearest])}
        facts |= {name: Share(sampled[key]) for name, key in OF_GROUPS.items()}
    if sampled["problems"] >= MIN_GROUPS:
        facts |= {name: Share(sampled[name]) for name in ("all_right", "all_wrong")}
    rewards = sampled["rewards"]
    hanging = next((name for name, reward in rewards.items() if reward["hangs"]), None)
    facts["failures"] = {name: reward["failures"] for name, reward in rewards.items() if reward["failures"]}
    worst = max(facts["failures"], key=facts["failures"].__getitem__, default=None)
    if name := hanging or worst:
        facts |= {
            "hanging_reward": hanging,
            "failing_reward": worst,
            "first_failure": rewards[name]["first_failure"],
        }
    return facts
