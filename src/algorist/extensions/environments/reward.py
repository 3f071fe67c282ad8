"""The reward that an environment pays; a module of its own, so that a recipe without environments imports nothing else of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from algorist.errors import ConfigError
from algorist.rewards.base import reward
from algorist.types import Problem, Rollout

REWARD = "get_reward"
"""Source of the turn that holds what an environment paid."""


@reward("environment", low=-math.inf, high=math.inf, needs_gold=False, source="TRL 1.16, environment_factory")
def environment(rollout: Rollout) -> float | None:
    """``get_reward()`` of the rollout's own environment; nothing where the environment has none."""
    turn = next((turn for turn in rollout.turns if turn.source == REWARD), None)
    if turn is not None and turn.error:
        raise RuntimeError(f"get_reward: {turn.reply}")
    return None if turn is None else json.loads(turn.reply)


def _probe(problems: Sequence[Problem], form: Any, *settings: Any) -> None:
    """Refuse the reward where nothing would ever be paid (ConfigError)."""
    environments = getattr(form.turns, "environments", None)
    if not (environments and environments.pays):
        lacking = "its environment has no get_reward" if environments else "the recipe has no environment"
        raise ConfigError(
            f"rewards names environment, which pays what get_reward of the environment returns, but {lacking}; write environment: "
            "mine.py:Class (docs/tools.md says what it needs), or leave the reward out"
        )


environment.probe = _probe  # type: ignore[attr-defined]
