"""From a recipe's ``grpo`` section to a trainer: one place that knows both vocabularies, ours and TRL's."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainingArguments

from algorist.config.schema import GRPOSection
from algorist.config.vllm_sections import ONLY_OURS, own_server
from algorist.errors import ConfigError, nearest
from algorist.models.precision import mixed_precision
from algorist.models.sharding import unwrap
from algorist.objectives.ratios import Correction
from algorist.prompts import PromptFormat
from algorist.rewards import RewardSet
from algorist.rollouts.base import RolloutEngine, SamplingParams
from algorist.rollouts.engines import make_engine
from algorist.training.grpo import AlgoristGRPOTrainer, OnRollouts
from algorist.training.log_probs import stop_recomputing
from algorist.training.own import find_advantage, find_loss
from algorist.training.rounding import bare_optimizer
from algorist.training.step import Objective
from algorist.training.training_arguments import optim_arguments
from algorist.types import Problem

TENSORS = ("log_probs", "old_log_probs", "advantages", "mask")
"""What a loss gets of the batch, by name."""


def sampling_params(section: GRPOSection, seed: int) -> SamplingParams:
    """Return how a ``grpo`` section samples."""
    same = section.model_dump(include={"temperature", "top_p", "top_k", "min_p"})
    return SamplingParams(**same, max_new_tokens=section.max_completion_tokens, seed=seed)


def check_enough_problems(problems: int, section: GRPOSection) -> None:
    """Refuse fewer problems than one rollout batch of all processes takes (ConfigError)."""
    rows = section.batch_size * (section.steps_per_generation or section.gradient_accumulation_steps)
    needed = rows * section.processes // section.group_size
    if problems >= needed:
        return
    shared, fewer = (" × processes", "fewer processes, ") if section.processes > 1 else ("", "")
    smaller = section.group_size * max(1, problems)
    raise ConfigError(
        f"one rollout batch takes {needed} problems (grpo.batch_size × steps{shared} / grpo.group_size), but there are only "
        f"{problems}; take more problems, {fewer}or fewer rows (grpo.batch_size × steps{shared} = {smaller} at most)"
    )


def objective_of(section: GRPOSection) -> Objective:
    """Return what a ``grpo`` section minimises.

    Raises:
        ConfigError: A function that cannot be loaded, or a parameter that the loss does not have.
    """
    loss = find_loss(section.loss)
    takes = {name for name in loss.parameters if name not in TENSORS}
    for name in section.loss_params:
        if name not in takes:
            raise ConfigError(
                f"grpo.loss_params has '{name}', which the loss '{section.loss}' does not have.{nearest(name, takes)} It has: "
                f"{', '.join(sorted(takes)) or 'no parameters'}"
            )
    unknown = [n for n, d in loss.parameters.items() if d is inspect.Parameter.empty and n not in TENSORS]
    if unknown:
        raise ConfigError(
            f"the loss '{section.loss}' asks for {', '.join(unknown)}.{nearest(unknown[0], TENSORS)} It gets "
            f"{', '.join(TENSORS)} by name; give every other parameter a default value"
        )
    keys = {
        "importance": section.importance_sampling_level,
        "clip_low": section.clip_low,
        "clip_high": section.clip_high,
    }
    return Objective(
        loss=loss,
        advantage=find_advantage(section.advantage),
        parameters={k: v for k, v in keys.items() if k in takes} | section.loss_params,
        beta=section.beta,
        entropy_bonus=section.entropy_bonus,
        top_entropy_share=section.top_entropy_share,
        longest=section.max_completion_tokens,
        mask_truncated=section.mask_truncated_completions,
        correction=_correction(section),
        skip=section.skip_zero_advantage,
    )


def _correction(section: GRPOSection) -> tuple[Correction, float | None, float | None] | None:
    """Return the correction for vLLM's log-probs, by TRL's settings and with TRL's defaults; None for our own engines."""
    given = section.vllm
    if section.engine != "vllm" or not given.importance_sampling_correction:
        return None
    if section.loss == "vespo":
        raise ConfigError(
            "grpo.loss=vespo is not corrected for the sampler; take grpo.vllm.importance_sampling_correction=false"
        )
    return (
        given.importance_sampling_mode,
        given.importance_sampling_clip_min,
        given.importance_sampling_clip_max,
    )


def make_grpo_trainer(
    *,
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    prompt_format: PromptFormat,
    section: GRPOSection,
    rewards: RewardSet,
    engine: RolloutEngine | None,
    output_dir: Path,
    seed: int,
    device: torch.device,
    matcher: str = "symbolic",
    on_rollouts: OnRollouts | None = None,
    callbacks: Sequence[Any] = (),
    report_to: Sequence[str] = (),
    run_name: str | None = None,
) -> Any:
    """Return the GRPO trainer of a recipe: ours, or stock TRL's for ``grpo.fast_update: false`` and TRL's own vLLM.

    Args:
        model: The policy, with its adapter if one is trained.
        tokenizer: Its tokenizer.
        problems: Training problems.
        prompt_format: Renders questions and parses completions.
        section: The recipe's ``grpo`` section.
        rewards: The recipe's rewards.
        engine: Rollout engine; None lets the section's vLLM generate: ours in this process or in a server, or TRL's
            integration for several processes without a server and for ``grpo.vllm.integration: trl``.
        output_dir: Folder of the checkpoints.
        seed: Seed of data order and sampling.
        device: Device of training.
        matcher: How answers are compared for the stored verdict.
        on_rollouts: Called by the main process with (steps done, groups, advantages (P, G)) for each rollout batch; groups that do
            not train come last, their advantages are NaN.
        callbacks: transformers callbacks.
        report_to: Trackers.
        run_name: Name of the run in trackers.

    Raises:
        ConfigError: Fewer problems than one step needs, or a setting that is unknown or not possible.
        MissingExtraError: ``engine`` is vllm, which cannot be imported.
    """
    check_enough_problems(len(problems), section)
    weights = dict(zip(rewards.names, rewards.weights, strict=True))
    objective = replace(objective_of(section), reward_weights=weights)
    through_trl = engine is None and section.engine == "vllm" and _through_trl(section)
    if engine is None and section.engine == "vllm" and not through_trl:
        engine = make_engine("vllm", model, tokenizer, vllm=section.vllm, together=True)
    if not section.gradient_checkpointing:  # SFT may have left it on
        stop_recomputing(unwrap(model))
    common = optim_arguments(
        section,
        output_dir=output_dir,
        seed=seed,
        device=device,
        report_to=report_to,
        mixed=mixed_precision(model, device),
    )
    common["run_name"] = run_name
    shared: dict[str, Any] = {
        "model": model,
        "tokenizer": tokenizer,
        "problems": problems,
        "prompt_format": prompt_format,
        "section": section,
        "rewards": rewards,
        "objective": objective,
        "sampling": sampling_params(section, seed),
        "matcher": matcher,
        "on_rollouts": on_rollouts,
        "callbacks": callbacks,
    }
    if through_trl or not section.fast_update:
        from algorist.training.stock import make_stock_trainer

        trainer: Any = make_stock_trainer(arguments=common, engine=engine, **shared)
    else:
        assert engine is not None
        args = TrainingArguments(
            **common,
            per_device_train_batch_size=section.batch_size * section.gradient_accumulation_steps,
            gradient_accumulation_steps=1,
            remove_unused_columns=False,
        )
        trainer = AlgoristGRPOTrainer(args=args, engine=engine, **shared)
    trainer.optimizer_cls_and_kwargs = bare_optimizer(model, section)
    trainer.remove_callback(PrinterCallback)  # the display shows the lines
    return trainer


def _through_trl(section: GRPOSection) -> bool:
    """Whether TRL's own integration runs vLLM: several processes or devices without a server, or on demand."""
    given = section.vllm
    several = getattr(given, "tensor_parallel_size", 1) > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1
    return given.integration == "trl" or (several and not own_server(given))


def vllm_arguments(section: GRPOSection) -> dict[str, Any]:
    """Return TRL's vLLM arguments of a section; what it leaves out is TRL's default.

    Raises:
        ConfigError: A setting that TRL's integration does not have, which runs vLLM in several processes.
    """
    from trl import GRPOConfig

    given = section.vllm.model_dump(exclude={"integration"})
    ours = [key for key in sorted(ONLY_OURS) if given.get(key) is not None]
    if ours and _through_trl(section):
        raise ConfigError(
            f"grpo.vllm.{ours[0]} is a setting of algorist's own vLLM in one process; several processes or devices go through "
            f"TRL's integration, which has none. Leave it out, or start a server (grpo.vllm.mode=server)"
        )
    known = {
        f"vllm_{key}": value for key, value in given.items() if value is not None or key.endswith("clip_max")
    }
    return {key: value for key, value in known.items() if key in GRPOConfig.__dataclass_fields__}
