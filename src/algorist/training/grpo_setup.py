"""From a recipe's ``grpo`` section to a trainer."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from algorist.config.schema import GRPOSection, Recipe
from algorist.errors import ConfigError
from algorist.models.dropout import switch_off_dropout
from algorist.models.sharding import unwrap
from algorist.objectives import Objective, advantage_named, loss_named, probe_advantage, probe_loss
from algorist.prompts import PromptFormat
from algorist.rewards import RewardSet
from algorist.rollouts.base import RolloutEngine, SamplingParams
from algorist.training.extension import Extensions
from algorist.training.grpo import AlgoristGRPOTrainer, OnRollouts
from algorist.types import Problem

log = logging.getLogger("algorist.training.grpo_setup")


def sampling_params(section: GRPOSection, seed: int) -> SamplingParams:
    """Return the sampling parameters of a ``grpo`` section."""
    same = section.model_dump(include={"temperature", "top_p", "top_k", "min_p"})
    stops = tuple(section.stop_strings or ())
    return SamplingParams(**same, max_new_tokens=section.max_completion_tokens, seed=seed, stop_strings=stops)


def check_enough_problems(problems: int, section: GRPOSection) -> None:
    """Refuse fewer problems than one rollout batch of all processes takes (ConfigError)."""
    needed = section.rows * section.processes // section.group_size
    if problems >= needed:
        return
    shared, fewer = (" × processes", "fewer processes, ") if section.processes > 1 else ("", "")
    smaller = section.group_size * max(1, problems)
    raise ConfigError(
        f"one rollout batch takes {needed} problems (grpo.batch_size × steps{shared} / grpo.group_size), but there are only "
        f"{problems}; take more problems, {fewer}or fewer rows (grpo.batch_size × steps{shared} = {smaller} at most)"
    )


def objective_of(section: GRPOSection, rewards: RewardSet) -> Objective:
    """Build the objective of a ``grpo`` section and the recipe's rewards.

    Raises:
        ConfigError: A function that cannot be loaded or used with these rewards, or a parameter that the loss does not have.
    """
    check_rewards(section, rewards)
    loss = loss_named(section.loss.name).with_settings(section.loss.parameters)
    if section.reduction is not None:
        loss = replace(loss, reduction=section.reduction)
    advantage = advantage_named(section.advantage)
    probe_loss(loss)
    probe_advantage(advantage, section.group_size, rewards.weights or [1.0])
    return Objective(
        loss=loss,
        advantage=advantage,
        entropy_bonus=section.entropy_bonus,
        longest=section.max_completion_tokens,
        mask_truncated=section.mask_truncated_completions,
        skip=section.skip_zero_advantage,
        reward_weights=dict(zip(rewards.names, rewards.weights, strict=True)),
    )


def check_rewards(section: GRPOSection, rewards: RewardSet) -> None:
    """Refuse rewards below 0 for an advantage that divides by their mean (ConfigError); an undeclared range passes."""
    low = rewards.bounds[0]
    if section.advantage == "maxrl" and -math.inf < low < 0:
        raise ConfigError(
            f"grpo.advantage=maxrl divides by the group's mean reward, but the sum of rewards can be {low:g}; expected rewards of at "
            "least 0, such as correct and well_formed: take the punishment out, or take grpo.advantage=leave_one_out"
        )


def make_grpo_trainer(
    *,
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    prompt_format: PromptFormat,
    section: GRPOSection,
    rewards: RewardSet,
    engine: RolloutEngine,
    output_dir: Path,
    seed: int,
    device: torch.device,
    matcher: str = "symbolic",
    extensions: Extensions | None = None,
    on_rollouts: OnRollouts | None = None,
    callbacks: Sequence[Any] = (),
    report_to: Sequence[str] = (),
    run_name: str | None = None,
) -> AlgoristGRPOTrainer:
    """Return the GRPO trainer of a recipe.

    Args:
        model: The policy, with its adapter if one is trained.
        tokenizer: Its tokenizer.
        problems: Training problems.
        prompt_format: Renders questions and parses completions.
        section: The recipe's ``grpo`` section.
        rewards: The recipe's rewards.
        engine: Rollout engine.
        output_dir: Folder of the checkpoints.
        seed: Seed of data order and sampling.
        device: Device of training.
        matcher: How answers are compared for the stored verdict.
        extensions: Those that take part in the run; those of the section when left out.
        on_rollouts: Called by the main process with (steps done, groups, advantages (P, G)) for each rollout batch; groups that do
            not train come last, their advantages are NaN.
        callbacks: transformers callbacks.
        report_to: Trackers.
        run_name: Name of the run in trackers.

    Raises:
        ConfigError: Fewer problems than one step needs, or a setting that is unknown or not possible.
    """
    check_enough_problems(len(problems), section)
    left = len(problems) % (batch := section.rows * section.processes // section.group_size)
    if section.epochs <= 1 and not section.max_steps and left * 100 >= len(problems):
        log.warning(
            "%d of %d problems fill no rollout batch of %d and are not trained on; grpo.epochs=2 trains on all, in another order each",
            left,
            len(problems),
            batch,
        )
    switch_off_dropout(unwrap(model))
    return AlgoristGRPOTrainer(
        model=model,
        tokenizer=tokenizer,
        problems=problems,
        prompt_format=prompt_format,
        section=section,
        rewards=rewards,
        engine=engine,
        sampling=sampling_params(section, seed),
        seed=seed,
        matcher=matcher,
        on_rollouts=on_rollouts,
        objective=objective_of(section, rewards),
        output_dir=output_dir,
        device=device,
        extensions=extensions or Extensions.of(Recipe(grpo=section)),
        callbacks=callbacks,
        report_to=report_to,
        run_name=run_name,
    )
