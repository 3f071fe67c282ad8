"""The whole preflight: load what the run would load, sample a little, try a few steps, advise."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from transformers import AutoConfig

from algorist.config.schema import Recipe
from algorist.data.golds import check_golds
from algorist.data.problems import Problems, fitting_problems, tokenizer_texts
from algorist.diagnosis.facts import ENOUGH, ENOUGH_ENDED, leaked_text
from algorist.diagnosis.rule import Facts, Finding, Share, apply
from algorist.diagnosis.rules import all_rules
from algorist.diagnosis.settings import Settings
from algorist.diagnosis.signals import MIN_GROUPS
from algorist.diagnosis.tokenization import out_of_vocabulary, tokenization_facts
from algorist.models.load import Policy, load_policy, make_policy, width_of
from algorist.models.loaders import loadable_name, own_loader
from algorist.models.memory import bound_memory, memory_limit
from algorist.models.precision import compute_dtype, pick_precision, weight_dtype
from algorist.preflight.completions import GROUP_SIZES, Look, sample
from algorist.preflight.memory_advice import ROOM, Plan, measured_steps, memory_steps, plan_from_config
from algorist.preflight.trial import try_grpo, try_sft
from algorist.prompts import PromptFormat
from algorist.prompts.chat import encode_prompt, opened_by_template
from algorist.runs.plan import make_plan
from algorist.store.run_log import clock
from algorist.store.stages import STAGES
from algorist.training.training_arguments import grpo_steps, sft_steps
from algorist.types import Group, Problem

log = logging.getLogger("algorist.preflight.run")

PROBE = 2
"""Problems that are sampled first, to see how many fit into the time."""
SHOWN_LENGTHS = (50, 90, 99, 100)
DEMONSTRATIONS = 100
"""Demonstrations whose length is looked at."""


@dataclass
class Preflight:
    """What was found before training; every part is JSON-ready."""

    batch: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, Any] = field(default_factory=dict)
    golds: dict[str, Any] = field(default_factory=dict)
    leaked: str | None = None
    """How many held-out problems are also trained on; None where there is none."""
    sampling: dict[str, Any] = field(default_factory=dict)
    sft: dict[str, Any] | None = None
    grpo: dict[str, Any] | None = None
    evaluations: dict[str, Any] | None = None
    memory_limit: int = 0
    """Bytes of the device."""
    model: str | None = None
    planned: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """What to change, for a stage that cannot fit whatever the batch; it is not tried."""
    tokenization: dict[str, Any] = field(default_factory=dict)
    extensions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What extensions saw, by name: ``rows`` of the table, ``advice``, and numbers of their own."""
    advice: list[Finding] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {**vars(self), "advice": [finding.as_dict() for finding in self.advice]}


def preflight(
    recipe: Recipe,
    *,
    problems: int = 24,
    samples: int = 8,
    trial: bool = True,
    model: Path | str | None = None,
    minutes: float = 1.0,
    say: Callable[[str], None] = lambda _: None,
) -> Preflight:
    """Look at a recipe on this machine before any training; nothing is written.

    Args:
        recipe: The resolved recipe.
        problems: Training problems that are sampled.
        samples: Completions per problem.
        trial: Also take a few real steps of each stage.
        model: Sample from this model instead of the recipe's start: a folder with weights or an adapter, such as the
            checkpoint of an SFT stage, which then counts as done; or a hub name.
        minutes: About how long it may take after the model is loaded: fewer problems are sampled and fewer steps tried where
            the time is not enough, one of each at least.
        say: Shows what is being done, with the time left.

    Raises:
        AlgoristError: What would stop the run as well.
    """
    import torch

    plan = make_plan(recipe, in_folder=False, model=model, say=say)
    for remark in plan.remarks:
        say(remark)
    recipe, data, device, form = plan.recipe, plan.problems, plan.device, plan.form
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    bound_memory(device)
    sft, grpo = recipe.sft.enabled and model is None, recipe.grpo.enabled or model is not None
    result = Preflight(memory_limit=memory_limit(), model=str(model) if model is not None else None)
    if model is None:
        result.planned, can_load = _plan_unloaded(recipe, device, result.memory_limit)
        if not can_load:
            result.batch = batch_arithmetic(recipe, len(data.train), len(data.sft))
            result.advice = advise(recipe, result)
            return result
    policy = _policy(recipe, data, form, device, model)
    form = opened_by_template(form, policy.tokenizer)
    data.train = fitting_problems(recipe.data.train, data.train, form, policy.tokenizer)
    result.batch = batch_arithmetic(recipe, len(data.train), len(data.sft))
    if not sft:
        result.batch.pop("sft", None)
    result.prompts = prompt_lengths(recipe, data.train, policy, form)
    result.golds = gold_coverage(data.train)
    result.leaked = leaked_text([*data.train, *data.sft], data.held_out)
    as_written, rendered = (data.sft, ()) if recipe.sft.source == "prompt_response" else ((), data.sft)
    result.tokenization = tokenization_facts(
        policy, form, data.train, as_written if sft else (), rendered if sft else ()
    )
    prompts = [encode_prompt(form, policy.tokenizer, p.question) for p in data.train[:problems]]
    if out_of_vocabulary(policy, prompts):
        result.advice = advise(recipe, result)
        return result
    ends = time.monotonic() + 60 * minutes
    if sft and trial and "sft" not in result.planned:
        say(f"trying a few SFT steps ({_left(ends)})")
        until = ends - 60 * minutes * (2 / 3 if grpo else 0)  # the rest is for GRPO
        result.sft = try_sft(recipe, policy, data.sft, form, device, until=until)
    if grpo:
        result.sampling, groups = _sampled(
            recipe, data.train[:problems], policy, form, samples, ends - 20 * minutes * trial, say
        )
        looked = Look(
            policy,
            data.train[: result.sampling["problems"]],
            form,
            samples,
            result.sampling["per_problem"],
            groups,
            data.sft if sft else (),
            device,
            say,
        )
        if recipe.grpo.enabled:
            result.extensions = plan.extensions.preview(looked)
        hang = [name for name, values in result.sampling["rewards"].items() if values["hangs"]]
        if trial and recipe.grpo.enabled and not hang and "grpo" not in result.planned:
            say(f"trying a few GRPO steps ({_left(ends)})")
            lengths, more_s = _planned(recipe, result)
            result.grpo = try_grpo(recipe, policy, data.train, form, device, lengths=lengths, until=ends)
            _add(result.grpo, lengths, result.sampling["tokens"], more_s)
    if recipe.eval.enabled:
        result.evaluations = _evaluations(recipe, data, policy, form, result)
    _plan_smaller(recipe, policy, result)
    result.advice = advise(recipe, result)
    return result


def _evaluations(
    recipe: Recipe, data: Problems, policy: Policy, form: PromptFormat, result: Preflight
) -> dict[str, Any]:
    """Return how many evaluations there will be and about how long they take: tokens by the speed of sampling.

    Before SFT completions are as long as those sampled, after it as the demonstrations.
    """
    section, sampled = recipe.eval, result.sampling
    limit = section.max_completion_tokens or recipe.grpo.max_completion_tokens
    if not sampled:
        grpo = recipe.grpo.model_copy(update={"max_completion_tokens": limit})
        of_two = recipe.model_copy(update={"grpo": grpo})
        sampled, _ = sample(of_two, data.held_out[:PROBE], policy, form, GROUP_SIZES[0])
    now = later = min(limit, sampled["tokens_mean"])
    if "sft" in result.batch:
        from algorist.training.sft import demonstrations

        demos = demonstrations(data.sft[:DEMONSTRATIONS], form, policy.tokenizer, recipe.sft.source)
        later = min(limit, mean(len(policy.tokenizer(demo.completion)["input_ids"]) for demo in demos))
    between = {
        stage: (result.batch[stage]["steps"] - 1) // every
        for stage in result.batch
        if (every := getattr(recipe, stage).eval_every)
    }
    after = len(result.batch) + sum(between.values())
    tokens = (now * section.baseline + later * after) * len(data.held_out) * (1 + section.samples)
    return {
        "evaluations": section.baseline + after,
        "problems": len(data.held_out),
        "completions": 1 + section.samples,
        "seconds": tokens / sampled["tokens_per_second"],
    }


def _sampled(
    recipe: Recipe,
    problems: Sequence[Problem],
    policy: Policy,
    form: PromptFormat,
    samples: int,
    until: float,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], list[Group]]:
    """Sample completions for as many problems as fit into the time; the first two say how many these are."""
    say(f"sampling {samples} completions for {len(problems)} problems ({_left(until)})")
    if len(problems) <= PROBE:
        return sample(recipe, problems, policy, form, samples)
    began = time.monotonic()
    first = sample(recipe, problems[:PROBE], policy, form, samples)
    now = time.monotonic()
    fit = int(PROBE * max(0.0, until - now) / max(now - began, 1e-3))
    if fit <= PROBE:
        say(f"{PROBE} problems took {clock(now - began)}: the time is over; more with --minutes")
        return first
    if fit < len(problems):
        say(
            f"{PROBE} problems took {clock(now - began)}: {fit} fit into the time; more with --minutes ({_left(until)})"
        )
    return sample(recipe, problems[:fit], policy, form, samples)


def _planned(recipe: Recipe, result: Preflight) -> tuple[list[int], float]:
    """Return the lengths of completions, and seconds of a step, with what extensions expect beyond what was sampled."""
    seen = result.extensions.values()
    more, limit = round(sum(part.get("more_tokens", 0) for part in seen)), recipe.grpo.max_completion_tokens
    lengths = [max(length, min(limit, length + more)) for length in result.sampling["tokens"]]
    return lengths, sum(part.get("more_s", 0.0) for part in seen)


def _add(tried: dict[str, Any], lengths: list[int], sampled: list[int], more_s: float) -> None:
    """Add to the time of tried steps what was expected and not sampled."""
    seconds = tried["seconds_per_step"] * sum(lengths) / max(1, sum(sampled)) + more_s
    tried |= {
        "seconds_per_step": seconds,
        "seconds": tried["steps"] * seconds,
        "completion_tokens": sum(lengths) / max(1, len(lengths)),
    }


def _left(until: float) -> str:
    return f"{clock(max(0.0, until - time.monotonic()))} left"


def _plan_smaller(recipe: Recipe, policy: Policy, result: Preflight) -> None:
    """Plan what to change for the stages that were tried and take too much."""
    for stage in STAGES:
        tried = getattr(result, stage)
        if not tried:
            continue
        memory = tried["memory"]
        if max(memory["peak"], memory["measured_peak"]) <= ROOM * result.memory_limit:
            continue
        weights = sum(p.numel() * p.element_size() for p in policy.model.parameters())
        plan = partial(
            plan_from_config,
            stage=stage,
            config=policy.model.config,
            dtype=weight_dtype(policy.model),
            compute=compute_dtype(policy.model),
            prompt_tokens=int(result.prompts["p99"]),
            base_bytes=max(0, memory["base"] - weights),
        )
        try:
            steps = memory_steps(recipe, stage, plan, policy.model.config, result.memory_limit)
        except Exception as error:  # as in ``_plan_unloaded``
            log.info("the changes for %s cannot be planned: %r", stage, error)
            steps = []
        steps = steps or measured_steps(recipe, stage, memory, result.memory_limit)
        if steps:
            result.planned[stage] = [step.as_dict() for step in steps]


def _plan_unloaded(recipe: Recipe, device: Any, limit: int) -> tuple[dict[str, list[dict[str, Any]]], bool]:
    """Return what to change for the stages that cannot fit, and whether the weights can be loaded at all.

    What the parts of a batch take is left to the trial, which halves a batch that is too large. A configuration that cannot
    be read is left to the loader, which says why.
    """
    section = recipe.model
    if section.name == "tiny" or own_loader(section):
        return {}, True
    try:
        name = loadable_name(section.name, section.revision)
        config = AutoConfig.from_pretrained(
            str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name,
            revision=section.revision or "main",
            trust_remote_code=section.trust_remote_code,
        )
    except Exception:
        return {}, True
    planned: dict[str, list[dict[str, Any]]] = {}
    if getattr(config, "quantization_config", None):  # its weights are smaller than their shapes say
        return {}, True
    can_load, tokens = True, recipe.data.train.max_prompt_tokens or 256
    kinds = pick_precision(section, device, width=width_of(config.to_dict()))
    types: dict[str, Any] = {"dtype": kinds.master, "compute": kinds.compute}
    try:
        for stage in (s for s in STAGES if getattr(recipe, s).enabled):
            plan: Plan = partial(plan_from_config, stage=stage, config=config, **types, prompt_tokens=tokens)
            now = plan(recipe)
            if now.base + now.gradients + now.optimizer > limit:
                steps = memory_steps(recipe, stage, plan, config, limit)
                planned[stage] = [step.as_dict() for step in steps]
            can_load = can_load and now.base <= limit
    except Exception as error:  # code of the model's own, or a forward that cannot run on shapes
        log.info("the memory of %s cannot be planned from its configuration: %r", section.name, error)
        return {}, True
    return planned, can_load


def _policy(
    recipe: Recipe, data: Problems, form: PromptFormat, device: Any, model: Path | str | None
) -> Policy:
    """Return the model that is looked at: ``model``, or what the run would start from."""
    if isinstance(model, Path):
        return load_policy(model, device=device, trainable=True, like=recipe.model)
    other = {"name": model, "revision": recipe.model.revision if model == recipe.model.name else None}
    section = recipe.model if model is None else recipe.model.model_copy(update=other)
    texts = tokenizer_texts([*data.sft[:4000], *data.train[:4000]], form)
    return make_policy(section, device=device, seed=recipe.seed, texts=texts, tags=form.markers)


def batch_arithmetic(recipe: Recipe, train: int, demonstrations: int) -> dict[str, Any]:
    """Return how many completions, problems and steps the settings amount to (one process)."""
    sft, grpo = recipe.sft, recipe.grpo
    numbers: dict[str, Any] = {}
    if sft.enabled:
        per_step = sft.batch_size * sft.gradient_accumulation_steps
        steps = sft_steps(sft, demonstrations)
        numbers["sft"] = {
            "demonstrations": demonstrations,
            "demonstrations_per_step": per_step,
            "steps": steps,
            "passes": round(steps * per_step / demonstrations, 3),
        }
    if grpo.enabled:
        per_step = grpo.batch_size * grpo.gradient_accumulation_steps
        problems = per_step / grpo.group_size / grpo.num_iterations
        steps = grpo_steps(grpo, train)
        numbers["grpo"] = {
            "problems": train,
            "completions_per_step": per_step,
            "problems_per_step": problems,
            "completions_per_problem": grpo.group_size,
            "steps": steps,
            "rollouts": int(steps * per_step / grpo.num_iterations),
            "passes": round(steps * problems / train, 3),
        }
    return numbers


def prompt_lengths(
    recipe: Recipe, problems: Sequence[Problem], policy: Policy, form: PromptFormat
) -> dict[str, Any]:
    """Return percentiles of the prompt lengths in tokens (of up to 2,000 prompts) and what fits the context."""
    lengths = sorted(len(encode_prompt(form, policy.tokenizer, p.question)) for p in problems[:2000])
    context = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
    shown = {f"p{q}": lengths[min(len(lengths) - 1, len(lengths) * q // 100)] for q in SHOWN_LENGTHS}
    room = context - recipe.grpo.max_completion_tokens if context else None
    too_long = sum(length > room for length in lengths) if room is not None else 0
    return {**shown, "looked_at": len(lengths), "context": context, "do_not_fit": too_long}


def gold_coverage(problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the share of gold answers that the grader can read, and examples of others."""
    unread = check_golds(problems).unreadable
    return {
        "readable_share": 1 - len(unread) / max(1, len(problems)),
        "unreadable": [f"{p.id}: {p.answer[:60]} ({why})" for p, why in unread[:5]],
    }


# ---- what the preflight measured as facts; the rules say what is wrong and what to change


SHARES = {
    "truncated": "truncated",
    "truncated_so_far": "truncated",
    "truncated_answered": "truncated_answered",
    "end_of_turn": "end_of_turn_as_text",
    "identical": "identical_groups",
    "broken_characters": "broken_characters",
    "pass_rate": "pass_rate",
    "all_right": "all_right",
    "all_wrong": "all_wrong",
}
"""Fact → what ``completions.sample`` calls it."""
AFTER_SFT = (
    "truncated", "truncated_so_far", "finished_unreadable", "broken_characters", "useful_here", "all_right", "all_wrong", "unreadable",
)  # fmt: skip
"""Facts that say nothing while SFT is still to come: before it a model from scratch or a base model knows no format."""


def advise(recipe: Recipe, look: Preflight) -> list[Finding]:
    """Return what the rules say, the most severe first; empty when nothing is wrong."""
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
    return [*apply(list(all_rules().values()), *views), *own]


def _memory(steps: list[dict[str, Any]]) -> dict[str, Any]:
    change = {key: value for step in steps for key, value in step["change"].items()}
    return {"memory_steps": [step["why"] for step in steps] or None, "memory_change": change}


def _facts(recipe: Recipe, look: Preflight) -> dict[str, Any]:
    prompts, golds, sampled = look.prompts, look.golds, look.sampling
    facts = {**look.tokenization, "do_not_fit": prompts.get("do_not_fit"), "context": prompts.get("context")}
    facts |= {"looked_at": prompts.get("looked_at"), "golds_unread": 1 - golds.get("readable_share", 1.0)}
    facts["leaked"] = look.leaked
    facts["gold_example"] = next(iter(golds.get("unreadable", ())), "")
    if sampled:
        facts |= _sampled_facts(recipe, sampled)
    if recipe.sft.enabled and look.model is None:
        facts = {name: value for name, value in facts.items() if name not in AFTER_SFT}
    return facts


def _sampled_facts(recipe: Recipe, sampled: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {name: Share(sampled[key]) for name, key in SHARES.items()}
    count = sampled["problems"] * sampled["samples"]
    facts |= {
        "where": f"{sampled['problems']} problems × {sampled['samples']}",
        "reasons": sampled["reasons"],
    }
    facts |= {"completions": count, "silent": sampled["unreadable"], "graded": count}
    if count >= ENOUGH:
        facts["unreadable"] = Share(sampled["unreadable"] / count)
    if sampled["problems"] < MIN_GROUPS:
        del facts["all_right"], facts["all_wrong"]
    if sampled["ended"] >= ENOUGH_ENDED:
        facts["finished_unreadable"] = Share(sampled["ended_unreadable"] / sampled["ended"])
        facts["tags"] = {tag: f"{share:.0%}" for tag, share in sampled["tags"].items()}
    shares, size = sampled["useful_share"], recipe.grpo.group_size
    nearest = min(shares, key=lambda g: abs(int(g) - size))
    facts |= {"useful_share": shares, "useful_here": (nearest, shares[nearest])}
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
