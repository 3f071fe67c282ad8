"""How a model is asked: in the prompt format that its recipe names, or as it was trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from algorist.config.schema import Recipe
from algorist.errors import ConfigError
from algorist.prompts import FORMATS, PromptFormat, get_format
from algorist.prompts.attached import Asked, attached
from algorist.prompts.base import TURN_SOURCES, turn_source, warn_of_missing_tags
from algorist.prompts.chat import attach
from algorist.store.safe_text import one_line

log = logging.getLogger("algorist.runs.asking")

DEFAULT_TOKENS = 512
"""Longest completion in tokens for a model that belongs to no run."""


def asked_as_trained(recipe: Recipe, model: Path | str | None = None) -> tuple[Recipe, PromptFormat]:
    """Return the recipe with its prompt as the model was trained with, and its prompt format; what differs is logged.

    What the recipe leaves out of ``prompt`` and ``eval.stop_strings`` is what the model's folder carries
    (``prompts.attached``), unless the recipe names another prompt format.

    Args:
        recipe: The resolved recipe.
        model: What is sampled from instead of the recipe's model: a folder or a hub name.
    """
    name = str(model or recipe.model.name)
    carried = attached(Path(name).expanduser()) if name != "tiny" else None
    if carried is not None:
        recipe = _filled(recipe, carried)
    form = recipe_format(recipe)
    knows_the_tags = carried is not None and carried.prompt_format.tags == form.tags
    if name != "tiny" and not recipe.sft.enabled and not knows_the_tags:
        warn_of_missing_tags(form)
    warn_if_asked_otherwise(name, carried, asked_in_training(recipe, form))
    return recipe, form


def _filled(recipe: Recipe, carried: Asked) -> Recipe:
    prompt, form, stops = recipe.prompt, carried.prompt_format, list(carried.stop_strings)
    named = prompt.format if "format" in prompt.model_fields_set else form.name
    if named != form.name or form.name not in FORMATS.names() or form.turns is not None:
        return recipe
    usual, written = FORMATS.get(form.name), prompt.model_fields_set
    if "system_prompt_path" in written:
        written = written | {"system_prompt"}
    theirs, ours = (
        {
            "system_prompt": f.system_prompt if f.is_chat else f.raw_template,
            "tags": asdict(f.tags),
            "template_kwargs": dict(f.template_kwargs),
            "system_role": f.system_role,
        }
        for f in (form, usual)
    )
    update = {key: value for key, value in theirs.items() if key not in written and value != ours[key]}
    sections: dict[str, Any] = {"prompt": prompt.model_copy(update={"format": form.name, **update})}
    if stops and "stop_strings" not in recipe.eval.model_fields_set:
        sections["eval"] = recipe.eval.model_copy(update={"stop_strings": stops})
        if recipe.grpo.stop_strings == recipe.eval.stop_strings:
            sections["grpo"] = recipe.grpo.model_copy(update={"stop_strings": stops})
    return recipe.model_copy(update=sections)


def attach_asking(tokenizer: Any, recipe: Recipe, form: PromptFormat) -> None:
    """Make how a recipe asks part of a tokenizer; one of the hub that says something else is named (a folder was in the plan)."""
    asking = asked_in_training(recipe, form)
    if not Path(tokenizer.name_or_path or ".").is_dir():
        warn_if_asked_otherwise(tokenizer.name_or_path, attached(tokenizer), asking)
    attach(tokenizer, asking)


def warn_if_asked_otherwise(model: str, trained: Asked | None, now: Asked) -> None:
    """Say where a model is asked in another way than it was trained."""
    if trained is None or not (differ := trained.differences(now)):
        return
    way = f"leave {' and '.join(differ)} out of the recipe"
    if form := differ.get("prompt.format"):
        differ, way = {"prompt.format": form}, f"prompt.format={trained.prompt_format.name}"
    shown = {key: [*_from_their_difference(*pair)] for key, pair in differ.items()}
    said = "; ".join(f"{key} was {theirs}, here {ours}" for key, (theirs, ours) in shown.items())
    warning = "%s was trained with another prompt than this recipe asks with: %s. As in its training: %s"
    log.warning(warning, model, said, way)


def _from_their_difference(before: Any, after: Any) -> Iterator[str]:
    """Yield both values as short texts; what two long texts begin with alike is left out."""
    texts = [str(value) if value else "none" for value in (before, after)]
    alike = next((n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    start = max(0, alike - 20) if alike > 40 else 0
    for text in texts:
        yield repr("…" * bool(start) + one_line(text[start:], 60))


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
    for source in TURN_SOURCES:
        if (turns := TURN_SOURCES.get(source).of_recipe(recipe)) is not None:
            form = turns.instructed(form)
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
        if trained.code and trained.prompt_format.name not in FORMATS.names():
            log.warning(
                "the model's prompt format '%s' is a user's class (%.80s) that is not loaded, so the model is asked and read without it; "
                "name the run's folder, which loads its plugins, or take another format: --format NAME",
                trained.prompt_format.name,
                one_line(trained.code),
            )
        return trained
    form = get_format(name or "boxed")  # what a model that was not trained here knows
    closing = form.tags.answer_close
    stops = (closing,) if closing and not form.is_chat else ()  # raw text has no turn that could end
    return Asked(form, trained.max_completion_tokens if trained else DEFAULT_TOKENS, stops)
