"""The whole preflight: load what the run would load, sample a little, try a few steps, advise."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from algorist.config.schema import Recipe
from algorist.diagnosis.signals import END_OF_TURN
from algorist.errors import AlgoristError
from algorist.grading import grade_completion, why_unreadable
from algorist.models.load import Policy, make_policy, pick_device
from algorist.preflight.advice import advise
from algorist.preflight.memory import memory_limit
from algorist.preflight.passrates import GROUP_SIZES, fit_pass_rates
from algorist.preflight.trial import Trial, grpo_steps, sft_steps, try_grpo, try_sft
from algorist.prepare import Problems, check_names, fitting_problems, recipe_format, tokenizer_texts
from algorist.prompts import PromptFormat
from algorist.prompts.chat import encode_prompt
from algorist.rollouts import make_engine
from algorist.rollouts.base import Completion, SamplingParams
from algorist.training.processes import check_eval_device
from algorist.types import Problem

SHOWN_LENGTHS = (50, 90, 99, 100)


@dataclass
class Preflight:
    """What was found before training; every part is JSON-ready."""

    batch: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, Any] = field(default_factory=dict)
    golds: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    sft: dict[str, Any] | None = None
    grpo: dict[str, Any] | None = None
    memory_limit: int | None = None
    advice: list[dict[str, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return dict(vars(self))


def preflight(
    recipe: Recipe,
    *,
    problems: int = 24,
    samples: int = 8,
    trial: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Preflight:
    """Look at a recipe on this machine before any training; nothing is written.

    Args:
        recipe: The resolved recipe.
        problems: Training problems that are sampled.
        samples: Completions per problem.
        trial: Also take a few real steps of each stage.
        say: Shows what is being done.

    Raises:
        AlgoristError: What would stop the run as well.
    """
    import torch

    check_names(recipe)
    check_eval_device(recipe.eval.device, recipe.grpo.engine)
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    data, device, form = Problems.load(recipe), pick_device(recipe.device), recipe_format(recipe)
    texts = tokenizer_texts([*data.sft[:4000], *data.train[:4000]], form)
    policy = make_policy(recipe.model, device=device, seed=recipe.seed, texts=texts, tags=form.tags.all())
    data.train = fitting_problems(recipe.data.train, data.train, form, policy.tokenizer)
    found = Preflight(memory_limit=memory_limit())
    found.batch = batch_arithmetic(recipe, len(data.train), len(data.sft))
    found.prompts = prompt_lengths(recipe, data.train, policy, form)
    found.golds = gold_coverage(data.train)
    if recipe.sft.enabled and trial:
        say("trying a few SFT steps")
        found.sft = try_sft(recipe, policy, data.sft, form, device).as_dict()
    if recipe.grpo.enabled:
        say(f"sampling {samples} completions for {min(problems, len(data.train))} problems")
        found.sampling = sample(recipe, data.train[:problems], policy, form, samples)
        if trial:
            say("trying a few GRPO steps")
            tried: Trial = try_grpo(
                recipe, policy, data.train, form, device, lengths=found.sampling["tokens"]
            )
            found.grpo = tried.as_dict()
    found.advice = advise(recipe, found)
    return found


def batch_arithmetic(recipe: Recipe, train: int, demonstrations: int) -> dict[str, Any]:
    """Return how many completions, problems and steps the settings amount to (one process)."""
    sft, grpo = recipe.sft, recipe.grpo
    found: dict[str, Any] = {}
    if sft.enabled:
        per_step = sft.batch_size * sft.gradient_accumulation_steps
        steps = sft_steps(sft, demonstrations)
        found["sft"] = {
            "demonstrations": demonstrations,
            "demonstrations_per_step": per_step,
            "steps": steps,
            "passes": round(steps * per_step / demonstrations, 3),
        }
    if grpo.enabled:
        per_step = grpo.batch_size * grpo.gradient_accumulation_steps
        problems = per_step / grpo.group_size / grpo.num_iterations
        steps = grpo_steps(grpo, train)
        found["grpo"] = {
            "problems": train,
            "completions_per_step": per_step,
            "problems_per_step": problems,
            "completions_per_problem": grpo.group_size,
            "steps": steps,
            "rollouts": int(steps * per_step / grpo.num_iterations),
            "passes": round(steps * problems / train, 3),
        }
    return found


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
    unread = [(p, why) for p in problems if (why := why_unreadable(p.answer))]
    return {
        "readable_share": 1 - len(unread) / max(1, len(problems)),
        "unreadable": [f"{p.id}: {p.answer[:60]} ({why})" for p, why in unread[:5]],
    }


def sample(
    recipe: Recipe, problems: Sequence[Problem], policy: Policy, form: PromptFormat, samples: int
) -> dict[str, Any]:
    """Sample completions and return pass rates, useful groups, truncation, reasons, speed.

    Raises:
        EngineError: The model cannot be sampled from.
    """
    section = recipe.grpo
    if section.engine == "vllm":
        section = section.model_copy(update={"engine": "auto"})
    params = SamplingParams(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        max_new_tokens=section.max_completion_tokens,
        seed=recipe.seed,
    )
    prompts = [encode_prompt(form, policy.tokenizer, p.question) for p in problems]
    policy.model.eval()
    began = time.perf_counter()
    groups = make_engine(section.engine, policy.model, policy.tokenizer).generate(prompts, samples, params)
    seconds = time.perf_counter() - began
    flat = [c for group in groups for c in group]
    tokens = sorted(len(c.token_ids) for c in flat)
    right, reasons, shown_end = _graded(recipe, problems, groups, policy, form)
    rates = fit_pass_rates(right, samples)
    return {
        "problems": len(problems),
        "samples": samples,
        "pass_rate": sum(right) / len(flat),
        "all_right": sum(k == samples for k in right) / len(right),
        "all_wrong": sum(k == 0 for k in right) / len(right),
        "useful_share": {str(g): round(rates.useful_share(g), 3) for g in GROUP_SIZES},
        "truncated": sum(c.finish_reason == "length" for c in flat) / len(flat),
        "end_of_turn_as_text": shown_end / len(flat),
        "reasons": dict(reasons.most_common()),
        "tokens_mean": sum(tokens) / len(tokens),
        "tokens": tokens,
        "tokens_per_second": sum(tokens) / seconds,
        "per_problem": {p.id: k / samples for p, k in zip(problems, right, strict=True)},
    }


def _graded(
    recipe: Recipe,
    problems: Sequence[Problem],
    groups: Sequence[Sequence[Completion]],
    policy: Policy,
    form: PromptFormat,
) -> tuple[list[int], Counter[str], int]:
    """Return right completions per problem, grading reasons, completions that show an end-of-turn token."""
    right: list[int] = []
    reasons: Counter[str] = Counter()
    shown = 0
    for problem, group in zip(problems, groups, strict=True):
        texts = [str(policy.tokenizer.decode(c.token_ids, skip_special_tokens=True)) for c in group]
        shown += sum(END_OF_TURN.search(text) is not None for text in texts)
        grades = []
        for text in texts:
            try:
                grades.append(
                    grade_completion(text, problem.answer, parsed=form.parse(text), matcher=recipe.matcher)
                )
            except AlgoristError as error:
                reasons[str(error)[:60]] += 1
        right.append(sum(g.correct for g in grades))
        reasons.update(g.reason for g in grades)
    return right, reasons, shown
