"""Stock ``trl.GRPOTrainer``, the reference of benchmarks and tests: untouched, on our rollouts, with our rewards.

It gets our engine through ``rollout_func`` and our rewards as reward functions, and calls the last of them so that the rollouts can be
stored. ``tests`` import this file as ``benchmarks.stock_trl``. As a program it is a run whose GRPO stage TRL's trainer does, such as

    torchrun --nproc-per-node 2 benchmarks/stock_trl.py smoke-cpu run_name=stock
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault(
    "HF_HUB_DISABLE_TELEMETRY", "1"
)  # TRL sends a request when it is imported and not told otherwise

import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from algorist.config.schema import GRPOSection
from algorist.errors import ConfigError
from algorist.models.precision import mixed_precision
from algorist.prompts import PromptFormat
from algorist.prompts.chat import render_prompt
from algorist.rewards import RewardSet
from algorist.rollouts.base import RolloutEngine, SamplingParams
from algorist.training.checkpoint import ExactCheckpoints
from algorist.training.distributed import PolicyEngine
from algorist.training.faults import FiniteSteps
from algorist.training.grpo import SEED_STRIDE
from algorist.training.grpo_setup import objective_of, sampling_params
from algorist.training.objective import advantages_of
from algorist.training.training_arguments import bare_optimizer, optim_arguments
from algorist.types import Group, Problem, Rollout
from algorist_grader import grade_completion


class StockGRPOTrainer(ExactCheckpoints, GRPOTrainer):
    """TRL's trainer with atomic checkpoints; a resumed run samples the rollout batch in use again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.faults = FiniteSteps(dict, self._note)
        self.add_callback(self.faults)
        self.averages = SimpleNamespace(add=self._note)  # where extensions put their quantities

    def _note(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._metrics["train"][name].append(value)


def make_stock_trainer(
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
    on_rollouts: Any = None,
    callbacks: Sequence[Any] = (),
    **_: Any,
) -> StockGRPOTrainer:
    """Return TRL's trainer for a ``grpo`` section; arguments as in ``make_grpo_trainer``, without an engine TRL's own sampling."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    rows = [{"prompt": render_prompt(prompt_format, tokenizer, p.question), **p.columns()} for p in problems]
    recorder = _Recorder({p.id: p for p in problems}, prompt_format, rewards, matcher, section.group_size)
    arguments = optim_arguments(
        section, output_dir=output_dir, seed=seed, device=device, mixed=mixed_precision(model, device)
    )
    trainer = StockGRPOTrainer(
        model=model,
        reward_funcs=recorder.functions(),
        args=trl_config(section, arguments, rewards.weights),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        rollout_func=_rollouts(engine, sampling_params(section, seed)) if engine is not None else None,
    )
    if on_rollouts is not None:
        objective = objective_of(section, rewards)
        recorder.send = lambda groups: on_rollouts(
            trainer.state.global_step, groups, advantages_of(groups, objective)
        )
    trainer.optimizer_cls_and_kwargs = bare_optimizer(model, section)
    trainer.remove_callback(PrinterCallback)
    return trainer


_SCALES = {"group_normalized": "group", "batch_normalized": "batch", "group_centered": "none"}
_SAME_NAMES = set(
    "gradient_accumulation_steps steps_per_generation num_iterations temperature top_p top_k beta "
    "mask_truncated_completions".split()
)
_OF_A_LOSS = {
    "clip_low": "epsilon", "clip_high": "epsilon_high", "importance": "importance_sampling_level",
    **{key: f"sapo_{key}" for key in ("temperature_pos", "temperature_neg")},
    **{key: f"vespo_{key}" for key in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
}  # fmt: skip


def trl_config(section: GRPOSection, arguments: dict[str, Any], weights: Sequence[float]) -> GRPOConfig:
    """Return a ``grpo`` section as TRL's configuration.

    Args:
        section: The section.
        arguments: Of ``TrainingArguments``.
        weights: One for each reward.
    """
    of_the_loss = {_OF_A_LOSS.get(key, key): value for key, value in section.loss.parameters.items()}
    return GRPOConfig(
        **arguments,
        **section.model_dump(include=_SAME_NAMES),
        **of_the_loss,
        per_device_train_batch_size=section.batch_size,
        num_generations=section.group_size,
        max_completion_length=section.max_completion_tokens,
        min_p=section.min_p or None,
        loss_type=section.loss.name,
        scale_rewards=_SCALES.get(section.advantage, "group"),
        reward_weights=list(weights),
        remove_unused_columns=False,
    )


def _rollouts(engine: RolloutEngine, sampling: SamplingParams) -> Any:
    """Return a ``rollout_func`` of TRL that samples with our engine; prompts arrive once per completion, group by group."""
    count = 0

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        nonlocal count
        group = trainer.num_generations
        if len(prompts) % group:
            raise ConfigError(
                f"stock TRL needs whole groups on each process: make grpo.batch_size × steps a multiple of {group}"
            )
        seed = None if sampling.seed is None else sampling.seed + SEED_STRIDE * count
        count += 1
        ids = [list(trainer.processing_class(text)["input_ids"]) for text in prompts[::group]]
        policy = PolicyEngine(engine, trainer, trainer.accelerator.process_index * len(prompts))
        groups = policy.generate(ids, group, replace(sampling, seed=seed))
        rows = [
            (prompt, completion) for prompt, found in zip(ids, groups, strict=True) for completion in found
        ]
        return {
            "prompt_ids": [prompt for prompt, _ in rows],
            "completion_ids": [completion.token_ids for _, completion in rows],
            "logprobs": [completion.log_probs for _, completion in rows],
        }

    return rollout


class _Recorder:
    """Puts together what TRL hands to the reward functions, and sends it when the last of them has been called."""

    def __init__(
        self, problems: dict[str, Problem], form: PromptFormat, rewards: RewardSet, matcher: str, size: int
    ) -> None:
        self.problems, self.form, self.rewards = problems, form, rewards
        self.matcher, self.size = matcher, size
        self.send: Any = None
        self.values: dict[str, list[float | None]] = {}

    def functions(self) -> list[Any]:
        """Return one reward function for each reward, under its name."""
        return [self._function(reward) for reward in self.rewards]

    def _function(self, reward: Any) -> Any:
        def function(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
            values: list[float | None] = reward(prompts, completions, **columns)
            self.values[reward.__name__] = values
            if reward.__name__ == self.rewards.names[-1] and self.send is not None:
                self.send(self._groups(prompts, completions, columns))
            return values

        function.__name__ = reward.__name__
        return function

    def _groups(self, prompts: list[str], completions: list[str], columns: dict[str, Any]) -> list[Group]:
        rollouts = []
        weights = dict(zip(self.rewards.names, self.rewards.weights, strict=True))
        for row, text in enumerate(completions):
            problem = self.problems[columns["problem_id"][row]]
            parsed = self.form.parse(text)
            values = {name: found[row] for name, found in self.values.items()}
            known = {name: value for name, value in values.items() if value is not None}
            rollouts.append(
                Rollout(
                    completion_ids=list(columns["completion_ids"][row]),
                    text=text,
                    log_probs=None,
                    truncated=False,
                    parsed=parsed,
                    grade=grade_completion(
                        text, problem.answer, parsed=parsed, matcher=self.matcher, problem=problem.columns()
                    ),
                    rewards=values,
                    reward=sum(weights[name] * value for name, value in known.items()) if known else None,
                )
            )
        return [
            Group(
                self.problems[columns["problem_id"][start]],
                prompts[start],
                [],
                rollouts[start : start + self.size],
            )
            for start in range(0, len(rollouts), self.size)
        ]


def main() -> None:
    """Run a recipe whose GRPO stage is TRL's."""
    from algorist.config.load import load_recipe
    from algorist.runs import pipeline

    pipeline.make_grpo_trainer = make_stock_trainer
    name, *settings = sys.argv[1:]
    pipeline.run_recipe(load_recipe(name, settings).recipe)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
