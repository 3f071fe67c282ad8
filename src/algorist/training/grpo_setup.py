"""From a recipe's ``grpo`` section to a trainer: one place that knows both vocabularies, ours and TRL's."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback

from algorist.config.schema import GRPOSection
from algorist.errors import ConfigError, nearest
from algorist.prompts import PromptFormat
from algorist.prompts.chat import render_prompt
from algorist.rollouts.base import RolloutEngine, SamplingParams
from algorist.rollouts.select import make_engine, own_server
from algorist.rollouts.vllm import SETTINGS
from algorist.rollouts.vllm_server import SERVER_SETTINGS
from algorist.training.arguments import optim_arguments
from algorist.training.grpo import AlgoristGRPOTrainer
from algorist.types import Problem

_VLLM_MODES = ("colocate", "server")


def sampling_params(section: GRPOSection, seed: int) -> SamplingParams:
    """Return how a ``grpo`` section samples."""
    return SamplingParams(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        max_new_tokens=section.max_completion_tokens,
        seed=seed,
    )


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


def grpo_rows(
    problems: Sequence[Problem], prompt_format: PromptFormat, tokenizer: Any
) -> list[dict[str, str]]:
    """Return the trainer's dataset: the rendered prompt of each problem, and what rewards and the store need."""
    return [
        {
            "prompt": render_prompt(prompt_format, tokenizer, p.question),
            "problem_id": p.id,
            "answer": p.answer,
            "question": p.question,
        }
        for p in problems
    ]


def make_grpo_trainer(
    *,
    model: Any,
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    section: GRPOSection,
    rewards: Sequence[Any],
    weights: Sequence[float],
    engine: RolloutEngine | None,
    output_dir: Path,
    seed: int,
    device: torch.device,
    on_rollouts: Callable[[list[dict[str, Any]]], None] | None = None,
    callbacks: Sequence[Any] = (),
    report_to: Sequence[str] = (),
    run_name: str | None = None,
) -> AlgoristGRPOTrainer:
    """Return the GRPO trainer of a recipe.

    Args:
        model: The policy, with its adapter if one is trained.
        tokenizer: Its tokenizer, padding on the left.
        rows: One row per problem, as ``grpo_rows`` makes them.
        section: The recipe's ``grpo`` section.
        rewards: TRL-callable rewards.
        weights: One weight per reward.
        engine: Rollout engine; None lets the section's vLLM generate: ours in this process or in a server, or TRL's
            integration for several processes without a server and for ``grpo.vllm.integration: trl``.
        output_dir: Folder of the checkpoints.
        seed: Seed of data order and sampling.
        device: Device of training.
        on_rollouts: Receives every rollout.
        callbacks: transformers callbacks.
        report_to: Trackers.
        run_name: Name of the run in trackers.

    Raises:
        ConfigError: Fewer problems than one step needs, or an unknown vLLM setting.
        MissingExtraError: ``engine`` is vllm, which cannot be imported.
    """
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    check_enough_problems(len(rows), section)
    args = grpo_config(
        section,
        weights=weights,
        output_dir=output_dir,
        seed=seed,
        device=device,
        report_to=report_to,
        run_name=run_name,
    )
    trainer_class = AlgoristGRPOTrainer
    if engine is None and section.engine == "vllm" and not _through_trl(section):
        engine = make_engine("vllm", model, tokenizer, vllm=section.vllm, together=True)
        args.use_vllm, trainer_class = False, VLLMTrainer
    trainer = trainer_class(
        model=model,
        reward_funcs=list(rewards),
        args=args,
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        engine=engine,
        sampling=sampling_params(section, seed),
        fast_update=section.fast_update,
        skip_zero_advantage=section.skip_zero_advantage,
        on_rollouts=on_rollouts,
    )
    trainer.remove_callback(PrinterCallback)  # the display shows the lines
    return trainer


def grpo_config(
    section: GRPOSection,
    *,
    weights: Sequence[float],
    output_dir: Path,
    seed: int,
    device: torch.device,
    report_to: Sequence[str] = (),
    run_name: str | None = None,
) -> Any:
    """Return TRL's ``GRPOConfig`` for a recipe's ``grpo`` section."""
    from trl import GRPOConfig

    vllm = {}
    if section.engine == "vllm":
        known = {f.removeprefix("vllm_") for f in GRPOConfig.__dataclass_fields__ if f.startswith("vllm_")}
        vllm = _vllm_arguments(section, known)
    return GRPOConfig(
        **optim_arguments(section, output_dir=output_dir, seed=seed, device=device, report_to=report_to),
        **vllm,
        use_vllm=section.engine == "vllm",
        run_name=run_name,
        num_train_epochs=section.epochs,
        max_steps=section.max_steps or -1,
        per_device_train_batch_size=section.batch_size,
        gradient_accumulation_steps=section.gradient_accumulation_steps,
        steps_per_generation=section.steps_per_generation,
        num_generations=section.group_size,
        num_iterations=section.num_iterations,
        max_completion_length=section.max_completion_tokens,
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p or None,
        loss_type=section.loss_type,
        scale_rewards=section.scale_rewards,
        beta=section.beta,
        epsilon=section.clip_low,
        epsilon_high=section.clip_high,
        importance_sampling_level=section.importance_sampling_level,
        mask_truncated_completions=section.mask_truncated_completions,
        reward_weights=list(weights),
        remove_unused_columns=False,
    )


class VLLMTrainer(AlgoristGRPOTrainer):
    """Rollouts by our vLLM engine, with TRL's importance-sampling correction of what vLLM and the trainer differ in.

    TRL corrects where ``use_vllm`` is set; while rollouts are made it stays off, so that TRL starts no vLLM of its own.
    """

    def _generate(self, prompts: list[Any]) -> Any:
        self.use_vllm = False
        try:
            return super()._generate(prompts)
        finally:
            self.use_vllm = bool(self.vllm_importance_sampling_correction)


def _through_trl(section: GRPOSection) -> bool:
    """Whether TRL's own integration runs vLLM: several processes or devices without a server, or on demand."""
    given = section.vllm
    several = int(given.get("tensor_parallel_size", 1)) > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1
    return given.get("integration") == "trl" or (several and not own_server(given))


def _vllm_arguments(section: GRPOSection, known: set[str]) -> dict[str, Any]:
    """Return TRL's vLLM arguments of a section; keys that only our engines read are left out."""
    given = section.vllm
    mode = str(given.get("mode", "colocate"))
    if mode not in _VLLM_MODES:
        raise ConfigError(
            f"grpo.vllm.mode is '{mode}'.{nearest(mode, _VLLM_MODES)} Expected colocate (vLLM in the training process) or server"
        )
    ours: set[str] = set()
    if not _through_trl(section):
        ours = set(SERVER_SETTINGS if own_server(given) else SETTINGS)
    for key in given:
        if key not in known | ours | {"integration"}:
            only = " (with mode colocate in one process it is one)" if key in SETTINGS else ""
            only = (
                " (with mode server and without integration trl it is one)"
                if key in SERVER_SETTINGS
                else only
            )
            raise ConfigError(
                f"grpo.vllm.{key} is no setting of vLLM here{only}.{nearest(key, known | ours)} Expected some "
                f"of {', '.join(sorted(known | ours))}"
            )
    return {f"vllm_{key}": value for key, value in given.items() if key in known}
