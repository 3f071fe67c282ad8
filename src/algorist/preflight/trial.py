"""A few real steps of each stage in a temporary folder: seconds per step and the measured peak."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median_high, pstdev
from typing import Any

from transformers import TrainerCallback

from algorist.config.schema import Recipe
from algorist.models.load import Policy
from algorist.models.memory import peak, reset_peak
from algorist.preflight.memory import MemoryPlan, Shape, plan_step
from algorist.prompts import PromptFormat
from algorist.prompts.chat import encode_prompt
from algorist.rewards import build_rewards
from algorist.rollouts import make_engine
from algorist.training.extension import Extensions
from algorist.training.training_arguments import grpo_steps, sft_steps
from algorist.types import Problem

STEPS, MOST_STEPS, ENOUGH_S = 4, 16, 2.0
"""A trial takes at least 4 steps, and up to 16 until 2 seconds are over: steps of milliseconds vary. The first pays for what is
built once and is not counted."""


class _Clock(TrainerCallback):
    """Times the steps of a trial and ends it after enough of them, or at ``until`` (``time.monotonic``)."""

    def __init__(self, until: float) -> None:
        self.seconds: list[float] = []
        self._began, self._until = 0.0, until

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        enough = len(self.seconds) >= STEPS and sum(self.seconds) >= ENOUGH_S
        if enough or time.monotonic() + self.seconds[-1] > self._until:
            control.should_training_stop = True


def try_sft(
    recipe: Recipe,
    policy: Policy,
    problems: Sequence[Problem],
    prompt_format: PromptFormat,
    device: Any,
    *,
    until: float,
) -> dict[str, Any]:
    """Train a few SFT steps on the policy (which changes) and return what they took; no step begins that would end after
    ``until`` (``time.monotonic``), except the first."""
    from algorist.training.sft import demonstrations, make_sft_trainer, tokenize_demonstrations

    demos = demonstrations(problems, prompt_format, policy.tokenizer, recipe.sft.source)
    rows, _ = tokenize_demonstrations(demos, policy.tokenizer, max_length=recipe.sft.max_length)
    steps = sft_steps(recipe.sft, len(rows))
    lengths = sorted(len(row["input_ids"]) for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        clock = _Clock(until)
        trainer = make_sft_trainer(
            model=policy.model,
            tokenizer=policy.tokenizer,
            demos=demos,
            section=recipe.sft.model_copy(update=_short(steps)),
            output_dir=Path(folder),
            seed=recipe.seed,
            device=device,
            callbacks=[clock],
        )
        longest = lengths[-max(1, len(lengths) // 100)] if lengths else 1
        plan = plan_step(trainer.model, Shape(recipe.sft.batch_size, 0, 0, longest), recipe.sft)
        return _train(trainer, clock, steps, plan)


def try_grpo(
    recipe: Recipe,
    policy: Policy,
    problems: Sequence[Problem],
    prompt_format: PromptFormat,
    device: Any,
    *,
    lengths: Sequence[int],
    until: float,
) -> dict[str, Any]:
    """Train a few GRPO steps on the policy (which changes) and return what they took.

    Args:
        recipe: The resolved recipe.
        policy: The policy.
        problems: Training problems.
        prompt_format: Their format.
        device: Device of training.
        lengths: Tokens of sampled completions, for the plan.
        until: No step begins that would end after it (``time.monotonic``), except the first.
    """
    from algorist.training.grpo_setup import make_grpo_trainer

    section, tokenizer = recipe.grpo, policy.tokenizer
    steps = grpo_steps(section, len(problems))
    with tempfile.TemporaryDirectory() as folder:
        clock = _Clock(until)
        trainer = make_grpo_trainer(
            model=policy.model,
            tokenizer=tokenizer,
            problems=problems,
            prompt_format=prompt_format,
            # An untrained policy has no useful groups; skipping them would make steps look cheap.
            section=section.model_copy(update={**_short(steps), "skip_zero_advantage": False}),
            rewards=build_rewards(recipe.rewards, prompt_format, matcher=recipe.matcher),
            matcher=recipe.matcher,
            engine=make_engine(section.engine, policy.model, tokenizer, section=section, together=True),
            output_dir=Path(folder),
            seed=recipe.seed,
            device=device,
            extensions=Extensions.of(Recipe(grpo=section, model=recipe.model)),
            callbacks=[clock],
        )
        longest = max(len(encode_prompt(prompt_format, tokenizer, p.question)) for p in problems[:200])
        total = section.batch_size * mean(lengths) + 2 * section.batch_size**0.5 * pstdev(lengths)
        shape = Shape(
            rows=section.batch_size,
            prompts=max(1, section.batch_size // section.group_size),
            prompt_tokens=longest,
            completion_tokens=max(lengths),
            total_tokens=int(total),
        )
        plan = plan_step(trainer.model, shape, section, extensions=trainer.extensions)
        return _train(trainer, clock, steps, plan)


def _train(trainer: Any, clock: _Clock, steps: int, plan: MemoryPlan) -> dict[str, Any]:
    """Train, and return seconds per step (median without the first), planned and measured peak (bytes), steps of the whole stage."""
    reset_peak()
    trainer.train()
    seconds = median_high(clock.seconds[1:] or clock.seconds)
    return {
        "seconds_per_step": seconds,
        "steps": steps,
        "seconds": steps * seconds,
        "memory": plan.as_dict() | {"measured_peak": peak()},
    }


def _short(steps: int) -> dict[str, Any]:
    return {
        "max_steps": min(MOST_STEPS, steps),
        "save_steps": 10**9,
        "logging_steps": 10**9,
        "eval_every": None,
    }
