"""The reward ``environment``: what a rollout's own environment paid."""

from __future__ import annotations

import json
import math

from algorist.rewards.base import reward
from algorist.types import Rollout

REWARD = "get_reward"
"""Source of the turn that holds it."""


@reward("environment", low=-math.inf, high=math.inf, needs_gold=False, source="TRL 1.16, environment_factory")
def environment(rollout: Rollout) -> float | None:
    """``get_reward()`` of the rollout's environment; nothing where the environment has none."""
    turn = next((turn for turn in rollout.turns if turn.source == REWARD), None)
    if turn is not None and turn.error:
        raise RuntimeError(f"get_reward: {turn.reply}")
    return None if turn is None else json.loads(turn.reply)
