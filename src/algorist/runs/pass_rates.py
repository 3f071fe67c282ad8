"""Table of the pass rates of a recipe's training problems, which ``runs/rate.py`` makes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from algorist.config.schema import Recipe
from algorist.declared import keys_added_to
from algorist.errors import ConfigError
from algorist.evaluation.run import code_of, fingerprint
from algorist.prompts import PromptFormat

FOLDER = "pass_rates"


def table_path(recipe: Recipe, form: PromptFormat, model: Path | str | None = None) -> Path:
    """Return the path of a model's table under the recipe's protocol, whether it exists or not.

    The name changes with whatever the rates depend on: model, prompt format, sampling, length, matcher.
    """
    protocol = protocol_of(recipe)
    mark = fingerprint(model or recipe.model.name, [], form, protocol)
    return Path(recipe.output_dir) / FOLDER / f"{mark}.json"


def protocol_of(recipe: Recipe) -> dict[str, Any]:
    """Return the settings beyond model, problems and prompt format that the rates depend on."""
    grpo, checker = recipe.grpo, recipe.data.train.checker
    return {
        **({"checker": code_of(checker.rpartition(":")[0])} if checker else {}),
        **({"chat_template": template} if (template := template_of(recipe)) else {}),
        "temperature": grpo.temperature,
        "top_p": grpo.top_p,
        **{key: value for key in ("top_k", "min_p", "stop_strings") if (value := getattr(grpo, key))},
        "max_completion_tokens": grpo.max_completion_tokens,
        "matcher": recipe.matcher,
        "revision": recipe.model.revision,
        **recipe.model.model_dump(include=keys_added_to("model"), exclude_defaults=True),  # quantised, …
    }


def template_of(recipe: Recipe) -> str:
    """Return the recipe's chat template, of a file its hash; an empty text where it is the model's own."""
    template = recipe.model.chat_template or ""
    return code_of(template) if os.path.isfile(template) else template  # noqa: PTH113 (Path.is_file raises for a text too long for a name)


def with_pass_rates(recipe: Recipe, form: PromptFormat) -> Recipe:
    """Return the recipe with ``data.train.pass_rates`` set, where it filters by pass rate without naming a table.

    Raises:
        ConfigError: No table of its model and protocol has been made.
    """
    section = recipe.data.train
    if section.pass_rate is None or section.pass_rates is not None:
        return recipe
    path = table_path(recipe, form)
    if not path.is_file():
        raise ConfigError(
            f"data.train.pass_rate is {list(section.pass_rate)}, but {recipe.model.name} has not been rated with this recipe's prompt, "
            f"sampling and length (there is no {path}). Rate it first: algorist data rate RECIPE with the same settings; or name a "
            "table: data.train.pass_rates=FILE"
        )
    train = section.model_copy(update={"pass_rates": str(path)})
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"train": train})})
