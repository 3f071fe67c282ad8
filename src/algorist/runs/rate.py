"""Rates every training problem with the model that GRPO would start from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from algorist.config.schema import Recipe
from algorist.data.load import key_of, read_table
from algorist.runs.pass_rates import protocol_of, table_path
from algorist.runs.sample import ready, sample_problems
from algorist.store.atomic import replace_text


def rate(
    recipe: Recipe,
    *,
    samples: int = 8,
    model: Path | str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Sample each training problem ``samples`` times, as GRPO would, and write or extend the table; return its path.

    Killed and started again, it continues with the batch that was not finished. Problems that the table has are not sampled again,
    unless it was made with another number of samples.

    Args:
        recipe: Names problems, prompt, sampling, matcher.
        samples: Completions per problem.
        model: A model folder or hub name; the recipe's model when left out.
        on_progress: Called with (problems done, problems in all).

    Raises:
        AlgoristError: The model or the problems cannot be loaded.
    """
    unrated = recipe.data.train.model_copy(update={"pass_rate": None, "pass_rates": None})
    data = recipe.data.model_copy(update={"train": unrated})
    own = recipe.model_copy(update={"data": data})
    plan, policy, problems = ready(own, model, "Rate what SFT has made of it: algorist data rate")
    recipe, form = plan.recipe, plan.form
    path = table_path(recipe, form, model)
    table: dict[str, Any] = read_table(path) if path.is_file() else {"samples": samples, "problems": {}}
    known = table["problems"] if table["samples"] == samples else {}
    new = list({key_of(p): p for p in problems if key_of(p) not in known}.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    keep = path.with_suffix(".progress.jsonl")
    rows, progress = sample_problems(
        recipe, policy, new, form, samples=samples, seed=recipe.seed, keep=keep, on_progress=on_progress
    )
    for number, problem in enumerate(new):
        right = sum(bool(row["correct"]) for row in rows[number * samples : (number + 1) * samples])
        known[key_of(problem)] = {"id": problem.id, "right": right}
    protocol = protocol_of(recipe) | {"prompt_format": form.name}
    rated = {"model": recipe.model.name, "samples": samples, "protocol": protocol, "problems": known}
    replace_text(path, json.dumps(rated, indent=0) + "\n")
    progress.remove()
    return path
