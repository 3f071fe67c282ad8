"""What a rollout engine is: prompts in, groups of completions with their log-probs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from algorist.errors import ConfigError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are sampled.

    ``temperature`` 0 means greedy. ``top_k`` 0 and ``top_p`` 1 and ``min_p`` 0 mean off. ``seed`` makes the rollouts
    repeatable; None takes the global generator. ``stop_token_ids`` end a completion and are kept as its last token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"temperature is {self.temperature}; expected 0 (greedy) or more, usually 1.0")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; expected a value in (0, 1]; 1.0 turns it off")
        if not 0 <= self.min_p < 1:
            raise ConfigError(f"min_p is {self.min_p}; expected a value in [0, 1); 0 turns it off")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; expected 0 (off) or a positive number")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; expected at least 1")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens is {self.min_new_tokens}; expected 0 … max_new_tokens ({self.max_new_tokens})"
            )


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion.

    ``log_probs[i]`` is the natural log-probability of ``token_ids[i]`` under the policy at the sampling temperature
    (temperature 1 for greedy), before top-k, top-p and min-p: the convention of the loss. ``finish_reason`` is
    ``stop`` (stop token or stop string, kept as part of the completion) or ``length`` (truncated).
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason


Prompts = Sequence[Sequence[int]]
"""P token-id lists, each distinct prompt once, without padding."""
Completions = list[list[Completion]]
"""``group_size`` completions for each prompt, in the order of the prompts."""


class RolloutEngine(Protocol):
    """Samples completions from the policy. Every engine passes ``tests/unit/test_rollout_conformance.py``."""

    name: str

    def generate(self, prompts: Prompts, group_size: int, params: SamplingParams) -> Completions:
        """Sample ``group_size`` completions for each prompt.

        Args:
            prompts: See ``Prompts``.
            group_size: Completions per prompt.
            params: Sampling settings.

        Raises:
            EngineError: The engine cannot do what was asked (empty prompt, prompt longer than the context, …).
        """
        ...
