"""A ``Draft`` becomes a ``Plan`` on this machine: processes, device, objective, extensions, every derived number.

Stages, preflight and iteration take a plan, and ``make_plan`` is the only way to get one, so nothing is checked or computed a second
time. In several processes each makes the same plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from algorist.config.schema import GRPOSection, Recipe, refuse_groups_of_one
from algorist.data.problems import Problems
from algorist.errors import ConfigError
from algorist.objectives import Objective
from algorist.prompts import PromptFormat
from algorist.prompts.chat import opened_by_template
from algorist.rewards import RewardSet, build_rewards
from algorist.runs.begin import has_adapter, without_adapter
from algorist.runs.draft import Draft
from algorist.runs.paid import with_paid_demonstrations
from algorist.store.run_folder import RunFolder
from algorist.store.run_log import kept_records
from algorist.training.extension import Extensions

if TYPE_CHECKING:
    import torch

    from algorist.training.processes import Processes

log = logging.getLogger("algorist.runs.plan")


@dataclass(frozen=True)
class Plan:
    """A recipe that can be run on this machine.

    Attributes:
        draft: What it was made from.
        recipe: As it will run: with its number of processes, without an adapter that is left out.
        processes: Those that share the run.
        form: The prompt format.
        objective: What GRPO minimises; None without GRPO.
        extensions: Those that take part.
        problems: What the recipe's data sections hold.
        remarks: What is to be said when the run begins.
        say: Shows a line.
    """

    draft: Draft
    recipe: Recipe
    processes: Processes
    form: PromptFormat
    objective: Objective | None
    extensions: Extensions
    problems: Problems
    remarks: tuple[str, ...]
    say: Callable[[str], None]

    @property
    def stages(self) -> tuple[str, ...]:
        """Training stages to do, where the recipe has them on."""
        return self.draft.stages

    @property
    def resume(self) -> bool:
        """Whether the run continues in its folder."""
        return self.draft.resume

    @property
    def rewards(self) -> RewardSet:
        """The rewards, which were tried; a run takes its own from its copies (``Run.rewards``)."""
        return self.draft.rewards

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.processes.device

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.recipe.path

    def opened(self, tokenizer: Any) -> Plan:
        """Return the plan with its prompt format as a model's template opens it, and rewards that read completions so."""
        form = opened_by_template(self.form, tokenizer)
        if form is self.form:
            return self
        rewards = build_rewards(self.recipe.rewards, form, matcher=self.recipe.matcher)
        return replace(self, form=form, draft=replace(self.draft, form=form, rewards=rewards))

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


def make_plan(draft: Draft, *, say: Callable[[str], None] = lambda _: None) -> Plan:
    """Return the plan of a draft; nothing is written, and no model is loaded.

    Raises:
        AlgoristError: Any user's mistake that can be known before a model is loaded.
    """
    from algorist.models.load import check_model, pick_device
    from algorist.training.grpo_setup import check_enough_problems, objective_of
    from algorist.training.processes import Processes
    from algorist.training.training_arguments import check_optimizers

    recipe = draft.recipe
    trains_grpo = recipe.grpo.enabled and "grpo" in draft.stages
    objective = objective_of(recipe.grpo, draft.rewards) if trains_grpo else None
    check_optimizers(recipe)
    processes = Processes.join(recipe.device)
    if recipe.eval.device is not None:
        pick_device(recipe.eval.device, "eval.device")
    check_model(recipe.model, processes.device)
    recipe = with_processes(recipe, processes.count)
    no_adapter, sft_skipped = processes.from_main(
        lambda: (why_no_adapter(recipe, draft.before, processes.count), sft_skipped_warning(draft))
    )
    if no_adapter:
        recipe = without_adapter(recipe)
    extensions, problems = Extensions.of(recipe), draft.problems
    remarks = tuple(filter(None, [no_adapter, *draft.remarks, sft_skipped]))
    plan = Plan(draft, recipe, processes, draft.form, objective, extensions, problems, remarks, say)
    if trains_grpo and not any(extension.teaches for extension in extensions):
        _check_learns(recipe)
    extensions.check(plan)
    if trains_grpo:
        check_enough_problems(len(problems.train), recipe.grpo)
    with kept_records() as probed:
        draft.rewards.probe(problems.train)
        problems = with_paid_demonstrations(recipe, problems, draft.rewards, draft.form)
    said = [note.getMessage() for note in probed if note.levelno >= logging.WARNING]
    return replace(plan, problems=problems, remarks=(*remarks, *said))


def _check_learns(recipe: Recipe) -> None:
    """Refuse GRPO from rewards that carry no signal (ConfigError)."""
    if all(reward.weight == 0 for reward in recipe.rewards):
        raise ConfigError(
            "every weight in rewards is 0 while grpo.enabled is true, so nothing would be learned; give one of them a weight, or name a "
            "teacher (grpo.teacher.model)"
            if recipe.rewards
            else "rewards is empty while grpo.enabled is true; name at least one reward"
        )
    refuse_groups_of_one(recipe.grpo)


def with_processes(recipe: Recipe, count: int) -> Recipe:
    """Return the recipe as ``count`` processes run it.

    Raises:
        ConfigError: Their batches together do not hold whole groups.
    """
    if recipe.grpo.processes == count:
        return recipe
    try:
        GRPOSection.model_validate(recipe.grpo.model_dump() | {"processes": count})
    except ValidationError as error:
        raise ConfigError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    return recipe.model_copy(update={"grpo": recipe.grpo.model_copy(update={"processes": count})})


def why_no_adapter(recipe: Recipe, before: Mapping[str, Any] | None, processes: int) -> str:
    """Explain why this run trains all weights though its recipe has an adapter, or return an empty string.

    ``model.lora.in_several_processes: off`` is decided when a run begins; a continued run keeps what it began with (``before``),
    whatever the number of processes is now.
    """
    lora = recipe.model.lora
    if lora is None or lora.in_several_processes == "keep":
        return ""
    if before is not None and not has_adapter(before):
        return "this run began without the recipe's LoRA adapter and continues without it: all weights are trained"
    if before is not None or processes == 1:
        return ""
    return (
        f"the run has {processes} processes, so its LoRA adapter is left out and all weights are trained, as "
        "model.lora.in_several_processes=off asks; to keep the adapter: model.lora.in_several_processes=keep"
    )


def sft_skipped_warning(draft: Draft) -> str:
    """Explain why GRPO starts without the recipe's SFT, or return an empty string: the caller skips it and the folder has none."""
    if not draft.in_folder:
        return ""
    recipe, stages, folder = draft.recipe, draft.stages, RunFolder(draft.recipe.path)
    skipped = recipe.sft.enabled and "sft" not in stages
    trains = recipe.grpo.enabled and "grpo" in stages and not folder.is_finished("grpo")
    named = "sft" not in stages and Path(recipe.model.name).exists()  # a model of the user's own
    if not (skipped and trains) or folder.is_finished("sft") or named:
        return ""
    return (
        f"SFT is skipped and {folder.path} has no finished SFT stage, so GRPO starts from {recipe.model.name} as it is. To do "
        "SFT first: leave --only out, or algorist run RECIPE --only sft, then algorist run RECIPE --only grpo --resume. If "
        "nothing is to be learned from demonstrations: sft.enabled=false"
    )
