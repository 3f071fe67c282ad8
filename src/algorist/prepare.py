"""What a run needs before its first step: names that exist, problems that load, a folder that is its own."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorist.config.changes import check_same_run
from algorist.config.explain import to_yaml
from algorist.config.load import load_run_recipe
from algorist.config.schema import DatasetSection, Recipe
from algorist.data import load_problems, with_solutions
from algorist.errors import CheckpointError, ConfigError
from algorist.grading import MATCHERS
from algorist.prompts import PromptFormat, get_format, missing_tags
from algorist.prompts.chat import encode_prompt
from algorist.rewards import build_rewards
from algorist.store.run_folder import RunFolder
from algorist.types import Problem

log = logging.getLogger("algorist.prepare")

DEFAULT_TOKENS = 512
"""Longest completion in tokens for a model that belongs to no run."""


def check_names(recipe: Recipe) -> None:
    """Refuse unknown prompt formats, rewards and matchers (ConfigError) before anything is loaded or written."""
    MATCHERS.get(recipe.matcher)
    found = get_format(recipe.prompt.format, tags=recipe.prompt.tags)
    build_rewards(recipe.rewards, found, matcher=recipe.matcher)


@dataclass
class Problems:
    """The problems of a run, loaded before its folder is made: a wrong path or column leaves nothing behind."""

    train: list[Problem]
    sft: list[Problem]
    held_out: list[Problem]

    @classmethod
    def load(cls, recipe: Recipe) -> Problems:
        """Load what the recipe names.

        Raises:
            DataError: A dataset, a column or a row is missing or unreadable.
        """
        train = load_problems(recipe.data.train)
        sft = load_problems(recipe.data.sft) if recipe.data.sft else train
        if recipe.sft.enabled:
            with_solutions(sft)
        return cls(train, sft, load_problems(recipe.data.eval) if recipe.eval.enabled else [])


def run_path(recipe: Recipe) -> Path:
    """Return the folder of a recipe's run."""
    return Path(recipe.output_dir) / (recipe.run_name or recipe.name)


def check_folder(recipe: Recipe, *, resume: bool) -> None:
    """Refuse a folder that holds another run, before anything is loaded or written.

    Raises:
        CheckpointError: The folder already holds a run and ``resume`` is off, or holds none and it is on.
        ConfigError: The recipe differs from the folder's in a way that would make another run.
    """
    path = run_path(recipe)
    if (path / "config.yaml").exists() and not resume and RunFolder(path).has_begun():
        raise CheckpointError(
            f"{path} already holds a run. Continue it with --resume, or take another name: run_name={path.name}-2"
        )
    if resume and not (path / "config.yaml").exists():
        raise CheckpointError(f"nothing to resume: {path} holds no run (config.yaml is missing)")
    if resume:
        check_same_run((path / "config.yaml").read_text(encoding="utf-8"), to_yaml(recipe), path)
        _check_finished(recipe, load_run_recipe(path), RunFolder(path))


def _check_finished(recipe: Recipe, before: Recipe, folder: RunFolder) -> None:
    """Refuse another length for a stage that is finished: ``config.yaml`` would say what was not done."""
    for stage in ("sft", "grpo"):
        old, new = getattr(before, stage), getattr(recipe, stage)
        for name in ("max_steps", "epochs"):
            was, now = getattr(old, name), getattr(new, name)
            if folder.is_finished(stage) and was != now:
                raise ConfigError(
                    f"{stage}.{name} is {now}, but {folder.path} has finished {stage} with {was}. Leave it as it was, or "
                    f"train on in a new run: run_name=NAME model.name={folder.path / stage / 'final'}"
                )


def open_folder(recipe: Recipe, *, resume: bool) -> RunFolder:
    """Create the run folder, or open it to resume."""
    path = run_path(recipe)
    if resume:
        folder = RunFolder.open(path)
    else:
        folder = RunFolder.create(path)
        folder.write_environment(seed=recipe.seed)
    folder.write_text("config.yaml", to_yaml(recipe))
    return folder


def recipe_format(recipe: Recipe) -> PromptFormat:
    """Return the prompt format of a recipe, its system prompt read from a file if one is named."""
    section = recipe.prompt
    system = section.system_prompt
    if section.system_prompt_path is not None:
        try:
            system = Path(section.system_prompt_path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"prompt.system_prompt_path: {error}") from None
    found = get_format(section.format, system_prompt=system, tags=section.tags)
    missing = missing_tags(found)
    if missing and recipe.model.name != "tiny" and not recipe.sft.enabled:
        log.warning(
            "the system prompt never shows %s; without SFT the model cannot know these tags",
            ", ".join(missing),
        )
    return found


def asked_format(recipe: Recipe | None, name: str | None) -> tuple[PromptFormat, int]:
    """Return the prompt format and the completion length to ask a model with: ``name``'s, else the recipe's, else ours."""
    found = get_format(name or "reasoning_answer") if name or recipe is None else recipe_format(recipe)
    return found, recipe.grpo.max_completion_tokens if recipe else DEFAULT_TOKENS


def tokenizer_texts(problems: Iterable[Problem], prompt_format: PromptFormat) -> list[str]:
    """Return the texts that the tokenizer of a model from scratch is trained on: questions and demonstrations."""
    return [text for p in problems for text in (p.question, prompt_format.demonstrate(p.solution, p.answer))]


def fitting_problems(
    section: DatasetSection, problems: list[Problem], prompt_format: PromptFormat, tokenizer: Any
) -> list[Problem]:
    """Return the problems whose prompts pass the section's length filters, which stand before its ``limit``."""
    if section.max_prompt_percentile is None and section.max_prompt_tokens is None:
        return problems
    return load_problems(
        section, prompt_tokens=lambda p: len(encode_prompt(prompt_format, tokenizer, p.question))
    )
