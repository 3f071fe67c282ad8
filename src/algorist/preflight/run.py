"""The whole preflight: load what the run would load, plan memory and time, sample a little, try a few steps, advise."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from algorist.config.schema import Recipe
from algorist.data.golds import check_golds
from algorist.data.problems import Problems, fitting_problems, tokenizer_texts
from algorist.diagnosis.course import odd_data
from algorist.diagnosis.facts import leaked_text
from algorist.diagnosis.rule import Finding
from algorist.diagnosis.rules import LONG_S
from algorist.diagnosis.tokenization import out_of_vocabulary, tokenization_facts
from algorist.evaluation.run import Pulse
from algorist.models.load import Policy, load_policy, make_policy, width_of
from algorist.models.loaders import loadable_name, own_loader
from algorist.models.memory import bounded_memory, memory_limit, memory_now
from algorist.models.modes import context_of
from algorist.models.precision import compute_dtype, pick_precision, weight_dtype
from algorist.preflight.advice import advise
from algorist.preflight.completions import Look, Sampler
from algorist.preflight.memory import evaluations_of, plan_step
from algorist.preflight.memory_advice import ROOM, Plan, measured_steps, memory_steps, plan_from_config
from algorist.preflight.reward_audit import Level, audit_own
from algorist.preflight.time import (
    LOOKED_AT,
    Sizes,
    Speed,
    batch_arithmetic,
    measure,
    might_last,
    seconds_of,
    total,
)
from algorist.preflight.trial import ENOUGH_S, try_stage
from algorist.prompts import PromptFormat
from algorist.prompts.chat import encode_prompt
from algorist.rollouts.base import OutOfTime
from algorist.runs.paid import fitting_and_paid
from algorist.runs.plan import Plan as RunPlan
from algorist.store.run_log import Display, Quiet
from algorist.store.stages import STAGES
from algorist.types import Group, Problem

if TYPE_CHECKING:
    from algorist.runs.pipeline import Run

log = logging.getLogger("algorist.preflight.run")

SHOWN_LENGTHS = (50, 90, 99, 100)


@dataclass
class Preflight:
    """Results of the checks before training; every part is JSON-ready."""

    batch: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, Any] = field(default_factory=dict)
    golds: dict[str, Any] = field(default_factory=dict)
    leaked: str | None = None
    """Overlap of held-out problems with those trained on, in words; None without any."""
    sampling: dict[str, Any] = field(default_factory=dict)
    sft: dict[str, Any] | None = None
    """Steps, seconds of a step and in all, memory; where steps were tried, as measured there."""
    grpo: dict[str, Any] | None = None
    evaluations: dict[str, Any] | None = None
    speed: dict[str, float] = field(default_factory=dict)
    stopped: bool = False
    """Ctrl-C ended it."""
    memory_limit: int = 0
    """Bytes of the device."""
    model: str | None = None
    planned: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Changes for a stage that cannot fit whatever the batch; it is not tried."""
    tokenization: dict[str, Any] = field(default_factory=dict)
    audit: dict[str, dict[Level, list[str]]] = field(default_factory=dict)
    """Name of a reward of the user's own → level → what was seen."""
    extensions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Results of extensions, by name: ``rows`` of the table, ``advice``, and numbers of their own."""
    advice: list[Finding] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {**vars(self), "advice": [finding.as_dict() for finding in self.advice]}

    @property
    def times(self) -> dict[str, Any]:
        """The parts that take their time."""
        parts = {name: getattr(self, name) for name in (*STAGES, "evaluations")}
        return {name: part for name, part in parts.items() if part}


def preflight(
    plan: RunPlan,
    *,
    problems: int = 24,
    samples: int = 8,
    trial: bool = True,
    model: Path | str | None = None,
    minutes: float = 2.0,
    display: Display | None = None,
    show: Callable[[Preflight], None] = lambda _: None,
) -> Preflight:
    """Look at a plan on this machine before any training; nothing is written.

    First arithmetic, memory and time, which need no sampling; then what a little sampling tells, and a few real steps.

    Args:
        plan: The plan of the run.
        problems: Training problems that are sampled, at most.
        samples: Completions per problem.
        trial: Also take a few real steps of each stage, where the time is enough.
        model: Sample from this model instead of the recipe's start: a folder with weights or an adapter, such as the
            checkpoint of an SFT stage, which then counts as done; or a hub name.
        minutes: How long sampling and trial may take once the model is loaded, whatever its size; with 0 nothing is sampled.
        display: Shows what is being done.
        show: Takes what is known before anything is sampled.

    Returns:
        What is known; where Ctrl-C ended it, ``stopped`` is true.

    Raises:
        AlgoristError: What would stop the run as well.
    """
    import torch

    display = display or Quiet()
    for remark in plan.remarks:
        display.say(remark)
    if plan.recipe.threads:
        torch.set_num_threads(plan.recipe.threads)
    with bounded_memory(plan.device):
        return _inspect(plan, model, display, problems, samples, minutes, trial=trial, show=show)


def _inspect(
    plan: RunPlan,
    model: Path | str | None,
    display: Display,
    problems: int,
    samples: int,
    minutes: float,
    *,
    trial: bool,
    show: Callable[[Preflight], None],
) -> Preflight:
    recipe, data = plan.recipe, plan.problems
    result = Preflight(memory_limit=memory_limit(), model=str(model) if model is not None else None)
    solved = any(p.solution for p in data.sft or data.train)
    if model is None:
        result.planned, can_load = _plan_unloaded(recipe, plan.device, result.memory_limit)
        if not can_load:
            result.batch = batch_arithmetic(recipe, len(data.train), len(data.sft))
            result.advice = advise(recipe, result, solved=solved)
            return result
    policy = start_policy(plan, model)
    plan = plan.opened(policy.tokenizer)
    data.train = fitting_problems(recipe.data.train, data.train, plan.form, policy.tokenizer)
    if recipe.sft.enabled:
        data.sft = fitting_and_paid(recipe, data.sft, plan.rewards, plan.form, policy.tokenizer)
    look = _Inspection(plan, policy, result, display, sft=recipe.sft.enabled and model is None)
    ends = time.monotonic() + 60 * minutes
    try:
        if look.read():
            look.figures()
            show(result)
            if recipe.grpo.enabled:
                result.audit = audit_own(plan.rewards, data.train, plan.form, matcher=recipe.matcher)
            look.sample(problems, samples, ends, trial=trial)
            if trial:
                look.try_stages(ends)
    except KeyboardInterrupt:
        result.stopped = True
    display.finished("sampling")
    _plan_smaller(recipe, policy, result)
    result.advice = advise(recipe, result, solved=solved)
    return result


def before_run(run: Run) -> Preflight | None:
    """Return time and memory of a run that is about to begin, with what they advise; None where it lasts no hour, also on a slow machine."""
    plan, recipe = run.plan, run.recipe
    policy = run.loaded()  # which leaves out problems that do not fit it
    data = Problems(run.train, run.sft, run.held_out)
    result = Preflight(memory_limit=memory_limit())
    look = _Inspection(replace(plan, problems=data), policy, result, run.display, sft=plan.trains("sft"))
    batch = batch_arithmetic(recipe, len(data.train), look.sizes.sft)
    result.batch = {stage: batch[stage] for stage in batch if plan.trains(stage)}
    if not might_last(recipe, policy.model, look.sizes, result.batch, LONG_S):
        return None
    look.figures()
    result.advice = [
        each
        for each in advise(recipe, result, solved=True)
        if each.name in ("takes_too_long", "does_not_fit")
    ]
    return result if total(result.times) > LONG_S else None


@dataclass
class _Inspection:
    """A loaded policy and what is known of its run so far."""

    plan: RunPlan
    policy: Policy
    result: Preflight
    display: Display
    sft: bool
    """Whether SFT is to come."""
    sizes: Sizes = field(init=False)
    speed: Speed = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        self.sizes = Sizes.of(plan.recipe, plan.problems, self.policy, plan.form, sft=self.sft)

    def read(self) -> bool:
        """Read the data; say whether the model can compute its prompts."""
        recipe, data, form, result = self.plan.recipe, self.plan.problems, self.plan.form, self.result
        result.batch = batch_arithmetic(recipe, len(data.train), self.sizes.sft)
        if not self.sft:
            result.batch.pop("sft", None)
        result.prompts = prompt_lengths(recipe, data.train, self.policy, form)
        result.prompts["longest_held_out"] = self.sizes.longest_held_out
        result.golds = gold_coverage(data.train)
        result.leaked = leaked_text([*data.train, *data.sft], data.held_out)
        demos = data.sft if self.sft else ()
        result.prompts["odd_data"] = odd_data(data.train, demos)
        as_written, rendered = (demos, ()) if recipe.sft.source == "prompt_response" else ((), demos)
        result.tokenization = tokenization_facts(self.policy, form, data.train, as_written, rendered)
        prompts = [encode_prompt(form, self.policy.tokenizer, p.question) for p in data.train[:LOOKED_AT]]
        return not out_of_vocabulary(self.policy, prompts)

    def figures(self) -> None:
        """Measure the machine; plan memory and time of each stage, and the evaluations' time."""
        recipe, data, form, policy = self.plan.recipe, self.plan.problems, self.plan.form, self.policy
        self.display.say("measuring this machine with this model …")
        memory = {
            stage: plan_step(
                policy.model,
                self.sizes.shape(recipe, stage),
                getattr(recipe, stage),
                base_bytes=memory_now(),
                extensions=self.plan.extensions,
                evaluations=evaluations_of(recipe, self.sizes.longest_held_out, len(data.held_out)),
            ).as_dict()
            for stage in self.result.batch
        }
        fits = all(m["base"] + m["gradients"] < self.result.memory_limit for m in memory.values())
        prompt = encode_prompt(form, policy.tokenizer, data.train[0].question)
        self.speed = measure(recipe, policy, prompt, self.plan.device, backward=fits)
        self.result.speed = asdict(self.speed)
        self.plan_time()
        for stage, planned in memory.items():
            getattr(self.result, stage)["memory"] = planned

    def plan_time(self, more_s: float = 0.0) -> None:
        """Plan the time of everything with what is known of the lengths."""
        times = seconds_of(self.plan.recipe, self.sizes, self.speed, self.result.batch, more_s)
        for name, values in times.items():
            setattr(self.result, name, (getattr(self.result, name) or {}) | values)

    def sample(self, most: int, samples: int, ends: float, *, trial: bool) -> None:
        """Sample as many problems as fit into the time, and let extensions look at them."""
        recipe, data, result = self.plan.recipe, self.plan.problems, self.result
        if not recipe.grpo.enabled and result.model is None:
            return
        for_trial = self._trial_s() if trial else 0.0
        if for_trial < (ends - time.monotonic()) / 2:  # else no step is tried
            ends -= for_trial
        sampler = Sampler(self.plan, self.policy)
        groups: list[Group] = []
        problems, limit = data.train[:most], recipe.grpo.max_completion_tokens
        while rest := problems[len(groups) :]:
            left = ends - time.monotonic()
            one = self.speed.sampling(self.sizes.prompt, [limit] * samples) - self.speed.call
            fitting = (left * self.speed.free - self.speed.call) / max(one, 1e-9)
            count = min(len(rest), max(not groups, int(fitting)))
            if count < 1 or left <= 0:
                break
            try:
                groups += self._draw(sampler, rest[:count], samples, ends)
            except OutOfTime as error:
                self.display.say(f"{error}; more with --minutes")
                break
        if not groups:
            return
        result.sampling = sampler.facts(groups)
        rates = result.sampling["per_problem"]
        looked = Look(
            self.plan, self.policy, problems[: len(groups)], samples, rates, groups,
            data.sft if self.sft else (), self.display.say,
        )  # fmt: skip
        if recipe.grpo.enabled:
            result.extensions = self.plan.extensions.preview(looked)
        seen = result.extensions.values()
        more = round(sum(part.get("more_tokens", 0) for part in seen))
        lengths = [max(length, min(limit, length + more)) for length in result.sampling["tokens"]]
        self.sizes = replace(
            self.sizes, start=lengths, completions=self.sizes.completions if self.sft else lengths
        )
        self.plan_time(sum(part.get("more_s", 0.0) for part in seen))

    def _draw(self, sampler: Sampler, problems: Sequence[Problem], samples: int, ends: float) -> list[Group]:
        """Return the groups of some problems; meanwhile the display counts tokens."""
        total = len(problems) * samples * self.plan.recipe.grpo.max_completion_tokens
        self.display.say(
            f"sampling {samples} completions of {len(problems)} problem{'s' * (len(problems) > 1)}, at most {total} tokens …"
        )
        with Pulse(partial(self.display.progress, "sampling"), total) as pulse:
            pulse.sampling(sampler.engine, 0, total)
            groups = sampler.draw(problems, samples, ends)
        self.display.finished("sampling")
        return groups

    def _trial_s(self) -> float:
        """Return about how long a trial of all stages takes: a step that builds things and one that is counted, at least."""
        each = [getattr(self.result, stage)["seconds_per_step"] for stage in self.result.batch]
        return sum(max(2 * seconds, ENOUGH_S) + ENOUGH_S for seconds in each) / self.speed.free

    def try_stages(self, ends: float) -> None:
        """Take a few real steps of each stage that fits into memory and into the time."""
        hang = any(values["hangs"] for values in self.result.sampling.get("rewards", {}).values())
        stages = [s for s in self.result.batch if s not in self.result.planned and not (hang and s == "grpo")]
        for stage in stages:
            planned, left = getattr(self.result, stage), ends - time.monotonic()
            seconds = planned["seconds_per_step"]
            if left * self.speed.free < 2 * seconds or self._too_large(planned):
                continue
            self.display.say(f"trying a few steps of {stage.upper()} …")
            until = time.monotonic() + left / (2 if stage != stages[-1] else 1)
            tried = try_stage(stage, self.plan, self.policy, steps=planned["steps"], until=until)
            planned["memory"]["measured_peak"] = tried.pop("measured_peak")
            sampled = self.result.sampling.get("tokens")
            # What a tried step samples has the lengths of now, not those after SFT or with an extension's tokens.
            longer = mean(self.sizes.completions) / mean(sampled) if stage == "grpo" and sampled else 1.0
            seconds = longer * tried["seconds_per_step"] + planned.get("more_s", 0.0)
            planned |= {"tried": True, "seconds_per_step": seconds}
            planned["seconds"] = planned["steps"] * planned["seconds_per_step"]

    def _too_large(self, planned: dict[str, Any]) -> bool:
        return bool(planned["memory"]["peak"] > self.result.memory_limit)


def _plan_smaller(recipe: Recipe, policy: Policy, result: Preflight) -> None:
    """Plan changes for the stages that were tried and take too much."""
    for stage in STAGES:
        tried = getattr(result, stage)
        if not tried:
            continue
        memory = tried["memory"]
        if max(memory["peak"], memory.get("measured_peak", 0)) <= ROOM * result.memory_limit:
            continue
        weights = sum(p.numel() * p.element_size() for p in policy.model.parameters())
        plan = partial(
            plan_from_config,
            stage=stage,
            config=policy.model.config,
            dtype=weight_dtype(policy.model),
            compute=compute_dtype(policy.model),
            device=policy.model.device,
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
    """Return changes for the stages that cannot fit, and whether the weights can be loaded at all.

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
    types: dict[str, Any] = {"dtype": kinds.master, "compute": kinds.compute, "device": device}
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


def start_policy(plan: RunPlan, model: Path | str | None) -> Policy:
    """Return the model that is looked at: ``model``, or what the run would start from."""
    recipe, data, device = plan.recipe, plan.problems, plan.device
    if isinstance(model, Path):
        return load_policy(model, device=device, trainable=True, like=recipe.model)
    other = {"name": model, "revision": recipe.model.revision if model == recipe.model.name else None}
    section = recipe.model if model is None else recipe.model.model_copy(update=other)
    texts = tokenizer_texts([*data.sft[:4000], *data.train[:4000]], plan.form)
    return make_policy(section, device=device, seed=recipe.seed, texts=texts, tags=plan.form.markers)


def prompt_lengths(
    recipe: Recipe, problems: Sequence[Problem], policy: Policy, form: PromptFormat
) -> dict[str, Any]:
    """Return percentiles of the prompt lengths in tokens (of up to 2,000 prompts) and what fits the context."""
    lengths = sorted(len(encode_prompt(form, policy.tokenizer, p.question)) for p in problems[:2000])
    context = context_of(policy.model)
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
