"""Stock ``trl.GRPOTrainer``, one switch away (``grpo.fast_update: false``): the reference that our own step is compared with.

TRL runs untouched; it gets our engine through ``rollout_func``, our rewards as reward functions, and calls the last of them so that
the rollouts can be stored. What it does not have (own losses, skipping, parts, exact resume inside a rollout batch) is refused or
missing, and said so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from algorist.training import trl_seam  # isort: skip  (sets TRL's telemetry switch before TRL is imported)
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from algorist.config.grpo_checks import check_stock
from algorist.config.schema import GRPOSection
from algorist.errors import ConfigError
from algorist.grading import grade_completion
from algorist.prompts import PromptFormat
from algorist.prompts.chat import render_prompt
from algorist.rewards import RewardSet
from algorist.rollouts.base import RolloutEngine, SamplingParams
from algorist.training.checkpoint import ExactCheckpoints
from algorist.training.faults import FiniteSteps
from algorist.training.grpo import SEED_STRIDE
from algorist.training.policy_engine import PolicyEngine
from algorist.training.step import Objective, advantages_of
from algorist.types import Group, Problem, Rollout

log = logging.getLogger("algorist.training.stock")

_SCALES = {"group_normalized": "group", "batch_normalized": "batch", "group_centered": "none"}
_SAME_NAMES = {
    "gradient_accumulation_steps", "steps_per_generation", "num_iterations", "temperature", "top_p", "top_k", "beta",
    "importance_sampling_level",
}  # fmt: skip
_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


class StockGRPOTrainer(ExactCheckpoints, GRPOTrainer):
    """TRL's trainer with atomic checkpoints; a resumed run samples the rollout batch in use again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.faults = FiniteSteps(dict, lambda values: trl_seam.note(self, values))
        self.add_callback(self.faults)


def make_stock_trainer(
    *,
    section: GRPOSection,
    arguments: dict[str, Any],
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    prompt_format: PromptFormat,
    rewards: RewardSet,
    objective: Objective,
    engine: RolloutEngine | None,
    sampling: SamplingParams,
    matcher: str,
    on_rollouts: Any,
    callbacks: Sequence[Any],
) -> StockGRPOTrainer:
    """Return TRL's trainer for a ``grpo`` section; arguments as in ``make_grpo_trainer``.

    Raises:
        ConfigError: The section asks for what TRL does not have.
    """
    try:
        check_stock(section)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if section.loss not in _LOSSES or section.advantage not in _SCALES:
        raise ConfigError(
            f"grpo.fast_update=false runs stock TRL, which has the losses {', '.join(_LOSSES)} and the advantages "
            f"{', '.join(_SCALES)}; the recipe has grpo.loss={section.loss}, grpo.advantage={section.advantage}. Take "
            "grpo.fast_update=true"
        )
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    rows = [{"prompt": render_prompt(prompt_format, tokenizer, p.question), **p.columns()} for p in problems]
    recorder = _Recorder({p.id: p for p in problems}, prompt_format, rewards, matcher, section.group_size)
    trainer = StockGRPOTrainer(
        model=model,
        reward_funcs=recorder.functions(),
        args=stock_config(section, arguments, rewards.weights),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        rollout_func=_rollouts(engine, sampling) if engine is not None else None,
    )
    if on_rollouts is not None:
        recorder.send = lambda groups: on_rollouts(
            trainer.state.global_step, groups, advantages_of(groups, objective)
        )
    return trainer


def stock_config(section: GRPOSection, arguments: dict[str, Any], weights: Sequence[float]) -> GRPOConfig:
    """Return TRL's configuration of a ``grpo`` section; ``arguments`` are those of ``TrainingArguments``."""
    from algorist.training.grpo_setup import vllm_arguments

    vllm = section.engine == "vllm"
    return GRPOConfig(
        **arguments,
        **(vllm_arguments(section) if vllm else {}),
        **section.model_dump(include=_SAME_NAMES),
        use_vllm=vllm,
        per_device_train_batch_size=section.batch_size,
        num_generations=section.group_size,
        max_completion_length=section.max_completion_tokens,
        min_p=section.min_p or None,
        loss_type=section.loss,
        scale_rewards=_SCALES.get(section.advantage, "group"),
        epsilon=section.clip_low,
        epsilon_high=section.clip_high,
        mask_truncated_completions=section.mask_truncated_completions,
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
                "grpo.fast_update=false needs whole groups on each process: make grpo.batch_size × steps a multiple of "
                f"grpo.group_size = {group}"
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
