"""A recipe becomes a ``Plan`` once: every check, every derived number, every extension that takes part.

Verbs, stages, preflight and iteration take a plan; ``make_plan`` is the only way to get one, so nothing is checked or computed a second
time. In several processes each makes the same plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from algorist.config.resume import (
    begun,
    run_path,
    why_from_the_model,
    why_no_adapter,
    with_processes,
    without_adapter,
)
from algorist.config.schema import Recipe, refuse_groups_of_one
from algorist.data.problems import Problems
from algorist.errors import ConfigError
from algorist.objectives import Objective
from algorist.prompts import PromptFormat
from algorist.rewards import RewardSet, build_rewards
from algorist.rollouts.engines import ENGINES
from algorist.runs.asking import asked_as_trained
from algorist.runs.paid import with_paid_demonstrations
from algorist.store.run_log import kept_records
from algorist.store.stages import STAGES
from algorist.training.extension import Extensions
from algorist_grader import MATCHERS

if TYPE_CHECKING:
    import torch

    from algorist.training.processes import Processes

log = logging.getLogger("algorist.runs.plan")


@dataclass(frozen=True)
class Plan:
    """A recipe that can be run on this machine.

    Attributes:
        recipe: As it will run: with its number of processes, its table of pass rates, without an adapter that is left out.
        stages: Training stages to do, where the recipe has them on.
        resume: Whether the run continues in its folder.
        processes: Those that share the run.
        form: The prompt format.
        objective: What GRPO minimises; None without GRPO.
        extensions: Those that take part.
        problems: What the recipe's data sections hold.
        remarks: What is to be said when the run begins.
        say: Shows a line.
    """

    recipe: Recipe
    stages: tuple[str, ...]
    resume: bool
    processes: Processes
    form: PromptFormat
    objective: Objective | None
    extensions: Extensions
    problems: Problems
    remarks: tuple[str, ...]
    say: Callable[[str], None]

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.processes.device

    @property
    def path(self) -> Path:
        """The run's folder."""
        return run_path(self.recipe)

    def trains(self, stage: str) -> bool:
        """Whether a training stage is to be done."""
        return stage in self.stages and bool(getattr(self.recipe, stage).enabled)

    @property
    def evaluates_base(self) -> bool:
        """Whether the model is evaluated before any training."""
        return self.recipe.eval.enabled and self.recipe.eval.baseline

    @property
    def rows_at_a_time(self) -> int:
        """Completions per engine call, of GRPO where there is one: evaluations between its steps take the same engine."""
        grpo, held_out = self.recipe.grpo, self.recipe.eval
        if not grpo.enabled:
            return held_out.batch_size * max(1, held_out.samples)
        return grpo.rows


def make_plan(
    recipe: Recipe,
    *,
    stages: Sequence[str] = STAGES,
    resume: bool = False,
    problems: Problems | None = None,
    in_folder: bool = True,
    model: Path | str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Check a recipe, load its problems, and return the plan; nothing is written, and no model is loaded.

    Args:
        recipe: The resolved recipe.
        stages: Training stages to do.
        resume: Continue the run in the same folder.
        problems: The recipe's problems, where they are loaded already.
        in_folder: Whether the plan's run has a folder of its own, which must be free, or hold the run to resume.
        model: What is sampled from instead of the recipe's model.
        say: Shows a line.

    Raises:
        AlgoristError: Any user's mistake that can be known before a model is loaded.
    """
    from algorist.models.load import check_model, pick_device
    from algorist.runs.pass_rates import with_pass_rates
    from algorist.training.grpo_setup import check_enough_problems, objective_of
    from algorist.training.processes import Processes
    from algorist.training.training_arguments import check_optimizers

    with kept_records() as notes:
        recipe, form = asked_as_trained(recipe, model)
        rewards = check_names(recipe, form)
    recipe = with_pass_rates(recipe, form)
    trains_grpo = recipe.grpo.enabled and "grpo" in stages
    objective = objective_of(recipe.grpo) if trains_grpo else None
    check_optimizers(recipe)
    processes = Processes.join(recipe.device)
    if recipe.eval.device is not None:
        pick_device(recipe.eval.device, "eval.device")
    check_model(recipe.model, processes.device)
    recipe = with_processes(recipe, processes.count)

    def begins() -> tuple[str, str]:
        before = begun(recipe, resume=resume) if in_folder else None
        return why_no_adapter(recipe, before, processes.count), why_from_the_model(recipe, stages) * in_folder

    no_adapter, from_the_model = processes.from_main(begins)
    if no_adapter:
        recipe = without_adapter(recipe)
    said = [note.getMessage() for note in notes if note.levelno >= logging.WARNING]
    plan = Plan(
        recipe,
        tuple(stages),
        resume,
        processes,
        form,
        objective,
        Extensions.of(recipe),
        problems or Problems([], [], []),
        tuple(filter(None, [no_adapter, *said, from_the_model])),
        say,
    )
    if trains_grpo and all(reward.weight == 0 for reward in recipe.rewards) and not plan.extensions.teach:
        raise ConfigError(
            "every weight in rewards is 0 while grpo.enabled is true, so nothing would be learned; give one of them a weight, or name a "
            "teacher (grpo.teacher.model)"
            if recipe.rewards
            else "rewards is empty while grpo.enabled is true; name at least one reward"
        )
    if trains_grpo and not plan.extensions.teach:
        refuse_groups_of_one(recipe.grpo)
    plan.extensions.check(plan)
    problems = problems or Problems.load(recipe, stages)
    if trains_grpo:
        check_enough_problems(len(problems.train), recipe.grpo)
    with kept_records() as probed:
        rewards.probe(problems.train)
        problems = with_paid_demonstrations(recipe, problems, rewards, form)
    said = [note.getMessage() for note in probed if note.levelno >= logging.WARNING]
    return replace(plan, problems=problems, remarks=(*plan.remarks, *said))


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


def check_names(recipe: Recipe, form: PromptFormat, *, own: bool = True) -> RewardSet:
    """Refuse an unknown matcher, engine or reward (ConfigError), and return the rewards; ``own=False`` leaves out a user's functions."""
    MATCHERS.get(recipe.matcher)
    for name in filter(None, (recipe.grpo.engine, recipe.eval.engine)):
        ENGINES.get(name)
    engine = recipe.eval.engine or recipe.grpo.engine
    if recipe.eval.device is not None and ENGINES.get(engine).own_device:
        raise ConfigError(
            f"eval.device is '{recipe.eval.device}' while their engine is {engine}, which samples where it runs; leave eval.device out, "
            "or take eval.engine=native"
        )
    specs = [spec for spec in recipe.rewards if own or ".py" not in spec.name]
    return build_rewards(specs, form, matcher=recipe.matcher)
