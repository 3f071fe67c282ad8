"""A recipe becomes a ``Draft``: all that can be known and refused before torch is loaded. ``runs/plan.py`` takes it further."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorist.config.own_files import Inputs, inputs_of
from algorist.config.schema import Recipe
from algorist.data.problems import Problems
from algorist.errors import ConfigError
from algorist.prompts import PromptFormat
from algorist.rewards import RewardSet, build_rewards
from algorist.rollouts.engines import ENGINES
from algorist.runs.asking import asked_as_trained
from algorist.runs.begin import settings_at_start
from algorist.runs.pass_rates import with_pass_rates
from algorist.store.run_folder import RunFolder
from algorist.store.run_log import kept_records
from algorist.store.stages import STAGES
from algorist.store.times import Took
from algorist_grader import MATCHERS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Draft:
    """A recipe whose names, files and data are there; no torch.

    Attributes:
        recipe: With its table of pass rates.
        stages: Training stages to do, where the recipe has them on.
        resume: Whether the run continues in its folder.
        in_folder: Whether the run has a folder of its own, which must be free, or hold the run to resume.
        form: The prompt format.
        rewards: The rewards.
        problems: What the recipe's data sections hold.
        inputs: The user's files and their hashes; in the main process.
        before: What the run to continue began with, by dotted key; None for one that begins, and beside the main process.
        remarks: What is to be said when the run begins.
        took: What the run takes of the machine from here on.
    """

    recipe: Recipe
    stages: tuple[str, ...]
    resume: bool
    in_folder: bool
    form: PromptFormat
    rewards: RewardSet
    problems: Problems
    inputs: Inputs
    before: Mapping[str, Any] | None
    remarks: tuple[str, ...]
    took: Took

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        *,
        stages: Sequence[str] = STAGES,
        resume: bool = False,
        in_folder: bool = True,
        model: Path | str | None = None,
    ) -> Draft:
        """Check a recipe, read its files and load its problems; nothing is written.

        Args:
            recipe: The resolved recipe.
            stages: Training stages to do.
            resume: Continue the run in the same folder.
            in_folder: Whether the run has a folder of its own, which must be free, or hold the run to resume.
            model: What is sampled from instead of the recipe's model.

        Raises:
            AlgoristError: Any user's mistake that can be known without torch.
        """
        took = Took(resumed=resume)
        with kept_records() as notes:
            recipe, form = asked_as_trained(recipe, model)
            rewards = check_names(recipe, form)
        recipe = with_pass_rates(recipe, form)
        looks = in_folder and os.environ.get("RANK", "0") == "0"  # other machines do not have the folder
        if looks and recipe.path.is_dir():
            with RunFolder(recipe.path).lock():
                pass  # another process that trains there is refused before torch is loaded
        inputs = inputs_of(recipe) if looks else {}
        before = settings_at_start(recipe, inputs, resume=resume) if looks else None
        remarks = tuple(note.getMessage() for note in notes if note.levelno >= logging.WARNING)
        problems = Problems.load(recipe, stages)
        return cls(
            recipe, tuple(stages), resume, in_folder, form, rewards, problems, inputs, before, remarks, took
        )


def check_stages(recipe: Recipe, stages: Sequence[str]) -> None:
    """Refuse a run that would do nothing; from Python it is a way to look at the problems.

    Raises:
        ConfigError: Every stage is off, and so is the evaluation before training.
    """
    on = [s for s in ("sft", "grpo") if s in stages and getattr(recipe, s).enabled]
    if not on and not (recipe.eval.enabled and recipe.eval.baseline):
        raise ConfigError(
            "this run would do nothing: neither SFT nor GRPO is on, and eval.baseline is false. Switch one of sft.enabled, "
            "grpo.enabled and eval.baseline on, or measure a model with algorist eval"
        )


def check_names(recipe: Recipe, form: PromptFormat) -> RewardSet:
    """Refuse an unknown matcher, engine or reward (ConfigError), and return the rewards."""
    MATCHERS.get(recipe.matcher)
    for name in filter(None, (recipe.grpo.engine, recipe.eval.engine)):
        ENGINES.get(name)
    engine = recipe.eval.engine or recipe.grpo.engine
    if recipe.eval.device is not None and ENGINES.get(engine).own_device:
        raise ConfigError(
            f"eval.device is '{recipe.eval.device}' while their engine is {engine}, which samples where it runs; leave eval.device out, "
            "or take eval.engine=native"
        )
    for stage in STAGES:
        if getattr(recipe, stage).eval_every and not recipe.eval.enabled:
            log.warning("%s.eval_every has no effect: eval.enabled is false, so nothing is evaluated", stage)
    if recipe.model.revision and Path(recipe.model.name).expanduser().exists():
        log.warning("model.revision has no effect: %s is on this machine, not on the hub", recipe.model.name)
    return build_rewards(recipe.rewards, form, matcher=recipe.matcher)
