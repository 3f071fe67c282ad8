"""What a reward is: a plain function of one completion, registered under a name with its declared range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from algorist.registry import Registry
from algorist.types import Parsed


@dataclass(frozen=True, slots=True)
class RewardInput:
    """What a reward may look at: the completion, its parse, the gold answer, and how answers are compared."""

    completion: str
    parsed: Parsed
    gold: str
    matcher: str = "symbolic"


RewardFunction = Callable[..., float]


@dataclass(frozen=True)
class Reward:
    """A registered reward: its function and the range that its values lie in."""

    name: str
    function: RewardFunction
    low: float
    high: float


REWARDS: Registry[Reward] = Registry("reward")


def reward(name: str, *, low: float, high: float) -> Callable[[RewardFunction], RewardFunction]:
    """Register ``function(inputs, **params) -> float`` under ``name``; the function itself stays as it is."""

    def decorate(function: RewardFunction) -> RewardFunction:
        REWARDS.register(name)(Reward(name, function, low, high))
        return function

    return decorate


def text_of(completion: Any) -> str:
    """Return the text of a completion in any form that TRL sends: text, message, list of messages or texts."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, dict):
        return str(completion.get("content") or "")
    if isinstance(completion, (list, tuple)):
        return text_of(completion[0]) if completion else ""
    return str(completion)
