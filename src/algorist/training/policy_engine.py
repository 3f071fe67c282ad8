"""The policy that is being trained, as a rollout engine."""

from __future__ import annotations

from typing import Any

import torch

from algorist.rollouts.base import Completions, Prompts, RolloutEngine, SamplingParams, Turns
from algorist.rollouts.model_info import eval_mode
from algorist.training.distributed import rank_draws, whole_weights


class PolicyEngine:
    """The trainer's engine on the weights of this moment: dropout off, whole weights, the random numbers of this process.

    Args:
        engine: Samples.
        trainer: Has the policy and the accelerator.
        first_row: Place of this process's first completion among those of all processes.
    """

    def __init__(self, engine: RolloutEngine, trainer: Any, first_row: int) -> None:
        self.engine, self.trainer, self.name = engine, trainer, engine.name
        self.row = first_row  # of the next completion among those of all processes

    def generate(
        self, prompts: Prompts, group_size: int, params: SamplingParams, turns: Turns | None = None
    ) -> Completions:
        accelerator = self.trainer.accelerator
        policy = accelerator.unwrap_model(self.trainer.model_wrapped, keep_fp32_wrapper=True)
        with (
            eval_mode(policy),
            torch.no_grad(),
            whole_weights(policy),
            rank_draws(accelerator, params, self.row) as drawn,
        ):
            more = () if turns is None else (turns,)
            groups = self.engine.generate(prompts, group_size, drawn, *more)
        self.row += len(prompts) * group_size
        return groups
