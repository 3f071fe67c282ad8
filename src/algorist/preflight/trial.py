"""A few real steps of each stage in a temporary folder: seconds per step and the measured peak."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median_high
from typing import Any

from transformers import TrainerCallback

from algorist.models.load import Policy
from algorist.models.memory import peak, reset_peak
from algorist.preflight.time import free_clock
from algorist.rollouts import make_engine
from algorist.runs.plan import Plan
from algorist.training.extension import Extensions

STEPS, MOST_STEPS, ENOUGH_S = 4, 16, 2.0
"""A trial takes at least 4 steps, and up to 16 until 2 seconds are over: steps of milliseconds vary. The first pays for what is
built once and is not counted."""


class _Clock(TrainerCallback):
    """Times the steps of a trial and ends it after enough of them, or at ``until`` (``time.monotonic``)."""

    def __init__(self, until: float) -> None:
        self.seconds: list[float] = []
        self._began, self._until = 0.0, until

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = free_clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(free_clock() - self._began)
        enough = len(self.seconds) >= STEPS and sum(self.seconds) >= ENOUGH_S
        if enough or time.monotonic() + self.seconds[-1] > self._until:
            control.should_training_stop = True


def try_stage(stage: str, plan: Plan, policy: Policy, *, steps: int, until: float) -> dict[str, Any]:
    """Train a few steps of a stage on the policy (which changes); return seconds per step (median without the first) and the peak (bytes).

    Args:
        stage: ``sft`` or ``grpo``.
        plan: The plan of the run.
        policy: The policy.
        steps: Those of the whole stage.
        until: No step begins that would end after it (``time.monotonic``), except the first.
    """
    clock = _Clock(until)
    short = {
        "max_steps": min(MOST_STEPS, steps),
        "save_steps": 10**9,
        "logging_steps": 10**9,
        "eval_every": None,
    }
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "model": policy.model,
            "tokenizer": policy.tokenizer,
            "output_dir": Path(folder),
            "seed": plan.recipe.seed,
            "device": plan.device,
            "callbacks": [clock],
        }
        make = _sft_trainer if stage == "sft" else grpo_trainer
        trainer = make(plan, short, common)
        reset_peak()
        trainer.train()
    return {"seconds_per_step": median_high(clock.seconds[1:] or clock.seconds), "measured_peak": peak()}


def _sft_trainer(plan: Plan, short: dict[str, Any], common: dict[str, Any]) -> Any:
    from algorist.training.sft import demonstrations, make_sft_trainer

    section = plan.recipe.sft
    demos = demonstrations(plan.problems.sft, plan.form, common["tokenizer"], section.source)
    return make_sft_trainer(demos=demos, section=section.model_copy(update=short), **common)


def grpo_trainer(plan: Plan, short: dict[str, Any], common: dict[str, Any]) -> Any:
    """Return the trainer of a trial of GRPO: ``short`` changes settings of the stage, ``common`` are the trainer's own."""
    from algorist.training.grpo_setup import make_grpo_trainer

    section = plan.recipe.grpo
    return make_grpo_trainer(
        problems=plan.problems.train,
        prompt_format=plan.form,
        # An untrained policy has no useful groups; skipping them would make steps look cheap.
        section=section.model_copy(update={**short, "skip_zero_advantage": False}),
        rewards=plan.rewards,
        matcher=plan.recipe.matcher,
        engine=make_engine(
            section.engine, common["model"], common["tokenizer"], section=section, together=True
        ),
        # What a recipe has beside its stages, trackers and the like, has no part in a trial.
        extensions=Extensions([e for e in plan.extensions if "" not in e.keys]),
        **common,
    )
