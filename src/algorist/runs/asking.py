"""How a model is asked: in the prompt format that its recipe names, or as it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from algorist.config.schema import Recipe
from algorist.errors import ConfigError
from algorist.prompts import PromptFormat, get_format
from algorist.prompts.attached import Asked
from algorist.prompts.base import turn_source, warn_of_missing_tags
from algorist.training.extension import Extensions

DEFAULT_TOKENS = 512
"""Longest completion in tokens for a model that belongs to no run."""


def recipe_format(recipe: Recipe) -> PromptFormat:
    """Return the prompt format of a recipe, its system prompt read from a file if one is named."""
    section = recipe.prompt
    system = section.system_prompt
    if section.system_prompt_path is not None:
        try:
            system = Path(section.system_prompt_path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"prompt.system_prompt_path: {error}") from None
        except UnicodeDecodeError as error:
            where = f"{section.system_prompt_path} is not UTF-8 (byte {error.start})"
            raise ConfigError(f"prompt.system_prompt_path: {where}; save it as UTF-8") from None
    form = replace(
        get_format(section.format, system_prompt=system, tags=section.tags),
        template_kwargs=section.template_kwargs,
        system_role=section.system_role,
    )
    form = Extensions.of(recipe).form(form)
    if recipe.model.name != "tiny" and not recipe.sft.enabled:
        warn_of_missing_tags(form)
    return form


def with_turns(prompt_format: PromptFormat, turns: Mapping[str, Any] | None) -> PromptFormat:
    """Return the format with who replies as the user's settings say, tried once; an empty mapping: nobody, None: as it is."""
    if not turns:
        return prompt_format if turns is None else replace(prompt_format, turns=None)
    source = turn_source(turns, trusted=True)
    source.check()
    return source.instructed(prompt_format)


def asked_in_training(recipe: Recipe, prompt_format: PromptFormat) -> Asked:
    """Return how a recipe asks its model."""
    limit = recipe.eval.max_completion_tokens or recipe.grpo.max_completion_tokens
    return Asked(prompt_format, limit, tuple(recipe.eval.stop_strings))


def how_to_ask(
    recipe: Recipe | None,
    name: str | None,
    of_model: Asked | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Asked:
    """Return how to ask a model: as it was trained, unless another prompt format or other switches are wanted.

    Args:
        recipe: The recipe of the run that the model belongs to.
        name: The prompt format that the user wants.
        of_model: What the model itself carries (``prompts.attached``); it wins over the recipe.
        template_kwargs: Switches of the chat template that differ from those of the training.
    """
    asking = _asked_before(recipe, name, of_model)
    form = asking.prompt_format
    switches = {**form.template_kwargs, **(template_kwargs or {})}
    return replace(asking, prompt_format=replace(form, template_kwargs=switches))


def _asked_before(recipe: Recipe | None, name: str | None, of_model: Asked | None) -> Asked:
    trained = of_model or (asked_in_training(recipe, recipe_format(recipe)) if recipe else None)
    if trained is not None and recipe is not None and trained.prompt_format.turns is not None:
        # The run's recipe may name code; what lies beside a model may not.
        own = replace(trained.prompt_format, turns=recipe_format(recipe).turns)
        trained = replace(trained, prompt_format=own)
    if trained is not None and name in (None, trained.prompt_format.name):
        return trained
    form = get_format(name or "reasoning_answer")
    closing = form.tags.answer_close
    stops = (closing,) if closing and not form.is_chat else ()  # raw text has no turn that could end
    return Asked(form, trained.max_completion_tokens if trained else DEFAULT_TOKENS, stops)
