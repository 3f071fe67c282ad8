"""A model's own completions as demonstrations: sampled as GRPO samples, graded, the right ones written as a dataset for SFT.

Source: rejection sampling fine-tuning (2308.01825); with a stronger model, sequence-level distillation (1606.07947).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from algorist.config.schema import Recipe
from algorist.data.problems import fitting_problems
from algorist.data.rollouts import pick, read_demonstration
from algorist.errors import ConfigError, DataError
from algorist.evaluation.record import mark_of
from algorist.evaluation.run import EvaluationSetting, Progress, evaluate
from algorist.models.load import Policy, policy_of
from algorist.prompts import PromptFormat
from algorist.rewards import RewardSet
from algorist.rollouts import make_engine
from algorist.runs.asking import attach_asking
from algorist.runs.draft import Draft
from algorist.runs.pass_rates import template_of
from algorist.runs.plan import Plan, make_plan
from algorist.store.atomic import replace_text
from algorist.store.run_folder import environment
from algorist.types import Problem


def sample_problems(
    recipe: Recipe,
    policy: Policy,
    problems: Sequence[Problem],
    form: PromptFormat,
    *,
    samples: int,
    seed: int,
    keep: Path,
    rewards: RewardSet | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[list[dict[str, Any]], Progress]:
    """Sample ``samples`` completions for each problem as GRPO samples; return their rows, and the progress.

    Killed and started again, it continues with the batch that was not finished; remove the progress when the rows are stored.

    Args:
        recipe: Sampling, engine, matcher.
        policy: Samples.
        problems: In the order of the rows.
        form: Renders prompts and parses completions.
        samples: Completions per problem.
        seed: Of the draws.
        keep: File of the finished batches.
        rewards: Those of the recipe, for the rows.
        on_progress: Called with (problems done, problems in all).
    """
    same = recipe.grpo.model_dump(include={"temperature", "top_p", "top_k", "min_p", "max_completion_tokens"})
    more: dict[str, Any] = {
        "batch_size": recipe.eval.batch_size,
        "stop_strings": tuple(recipe.grpo.stop_strings or ()),
    }
    setting = EvaluationSetting(samples=samples, matcher=recipe.matcher, seed=seed, **same, **more)
    mark = mark_of(recipe.model.name, problems, form, setting, [], rewards) + template_of(recipe)
    progress = Progress(keep, mark)
    engine = make_engine(recipe.grpo.engine, policy.model, policy.tokenizer, section=recipe.grpo)
    beside: dict[str, Any] = {"rewards": rewards, "progress": progress, "on_progress": on_progress}
    rows = evaluate(engine, policy.tokenizer, problems, form, setting, greedy=False, **beside)
    return rows, progress


def ready(recipe: Recipe, model: Path | str | None, instead: str) -> tuple[Plan, Policy, list[Problem]]:
    """Return a plan whose recipe names the model that is sampled from, that model, and the training problems that fit.

    Args:
        recipe: Names problems, prompt, sampling, matcher.
        model: A model folder or hub name; the recipe's model when left out.
        instead: What to do with a model from scratch, up to the verb.

    Raises:
        ConfigError: The model is made from scratch.
    """
    name = str(model or recipe.model.name)
    if name == "tiny":
        raise ConfigError(
            f"model.name is tiny: made from scratch, it solves nothing before it is trained. {instead} RECIPE --model RUN/sft/final"
        )
    plan = make_plan(Draft.of(recipe, stages=(), in_folder=False, model=model))
    recipe = plan.recipe
    policy = policy_of(model or recipe.model.name, device=plan.device, like=recipe.model)
    attach_asking(policy.tokenizer, recipe, plan.form)
    problems = fitting_problems(recipe.data.train, plan.problems.train, plan.form, policy.tokenizer)
    named = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": name})})
    return replace(plan, recipe=named), policy, problems


@dataclass(frozen=True)
class SampleCounts:
    """Counts of sampled completions."""

    path: str
    problems: int
    completions: int
    right: int
    solved: int
    """Problems with a right completion."""
    repeated: int
    unreadable: int
    """Right completions that do not follow the prompt format, were cut off, or were answered by an environment or a chat's tool."""
    written: int


def sample(
    recipe: Recipe,
    path: Path,
    *,
    samples: int = 8,
    per_problem: int | None = None,
    model: Path | str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> SampleCounts:
    """Sample the recipe's training problems and write the right completions to ``path`` (JSONL), with their provenance beside them.

    Args:
        recipe: Names problems, prompt, sampling, matcher.
        path: The dataset; ``NAME.provenance.json`` says where it comes from.
        samples: Completions per problem.
        per_problem: Most demonstrations of a problem, the shortest; all different ones when left out.
        model: A model folder or hub name; the recipe's model when left out.
        on_progress: Called with (problems done, problems in all).

    Raises:
        ConfigError: The model is made from scratch, or the file exists.
        DataError: No completion is right.
    """
    if path.exists():
        raise ConfigError(f"{path} exists; take another name (--out), or remove it")
    plan, policy, problems = ready(
        recipe, model, "Sample what SFT has made of it, or a teacher: algorist data sample"
    )
    recipe, form, name = plan.recipe, plan.form, plan.recipe.model.name
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, progress = sample_problems(
        recipe,
        policy,
        problems,
        form,
        samples=samples,
        seed=recipe.seed,
        keep=path.with_suffix(".progress.jsonl"),
        on_progress=on_progress,
    )
    text, result = demonstrations(rows, problems, form, path, per_problem)
    if not result.written:
        progress.remove()
        raise DataError(
            f"none of {len(rows)} completions of {name} for {len(problems)} problems is right and follows the format '{form.name}' "
            f"({result.right} are right), so there is nothing to write. Sample more (--samples {8 * samples}), easier problems "
            "(data.train.…), or a stronger model (--model)"
        )
    made_by = provenance(plan, name, samples, text, result)
    replace_text(provenance_of(path), made_by)
    replace_text(path, text)
    progress.remove()
    return result


def provenance(plan: Plan, model: str, samples: int, text: str, counts: SampleCounts) -> str:
    """Return as JSON how the demonstrations ``text`` were made."""
    recipe = plan.recipe
    made_by = {
        "model": model,
        "recipe": recipe.name,
        "seed": recipe.seed,
        "sampling": {
            "samples": samples,
            "temperature": recipe.grpo.temperature,
            "top_p": recipe.grpo.top_p,
            "max_completion_tokens": recipe.grpo.max_completion_tokens,
        },
        "prompt_format": plan.form.name,
        "matcher": recipe.matcher,
        "data": recipe.data.train.model_dump(mode="json", exclude_defaults=True),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        **{key: value for key, value in asdict(counts).items() if key != "path"},
        "environment": environment(),
    }
    return json.dumps(made_by, indent=2, default=str) + "\n"


def provenance_of(path: Path) -> Path:
    """Return the file that says where a dataset comes from."""
    return path.with_suffix(".provenance.json")


OF_ITS_OWN = ("prompt", "response", "completion", "messages", "conversations")
"""Columns of a row's own demonstration, which the sampled one replaces; the others are what checkers and rewards read."""


def demonstrations(
    rows: Sequence[dict[str, Any]],
    problems: Sequence[Problem],
    form: PromptFormat,
    path: Path,
    per_problem: int | None = None,
) -> tuple[str, SampleCounts]:
    """Return the right completions among the rows of ``evaluate`` as JSONL, each once, and the counts."""
    known = {problem.id: problem for problem in problems}
    right = [row for row in rows if row["correct"]]
    entries: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    repeated = unreadable = 0
    for row in right:
        read = None if row["truncated"] else read_demonstration(row, form)
        if read is None:
            unreadable += 1
        elif read in (own := entries.setdefault(row["problem_id"], {})):
            repeated += 1
        else:
            own[read] = row
    lines = []
    for identity, own in entries.items():
        problem = known[identity]
        items = pick([(row, *read) for read, row in own.items()], "shortest", per_problem)
        for number, (_, reasoning, answer) in enumerate(items):
            fields = {"subject": problem.subject, "level": problem.level, "checker": problem.checker}
            line = (
                {name: value for name, value in problem.extra.items() if name not in OF_ITS_OWN}
                | {
                    "id": f"{identity}#{number}" if number else identity,
                    "question": problem.question,
                    "answer": problem.answer,
                    "solution": reasoning,
                    "demonstrated_answer": answer,
                }
                | {field: value for field, value in fields.items() if value}
            )
            lines.append(json.dumps(line, ensure_ascii=False, default=str) + "\n")
    solved = len({row["problem_id"] for row in right})
    counts = len(problems), len(rows), len(right), solved, repeated, unreadable, len(lines)
    return "".join(lines), SampleCounts(str(path), *counts)
