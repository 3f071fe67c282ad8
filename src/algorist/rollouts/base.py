"""Interface of rollout engines: prompts in, groups of completions with their log-probs out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from algorist.errors import ConfigError, EngineError
from algorist.types import Turn

if TYPE_CHECKING:
    from algorist.config.schema import GRPOSection


class OutOfTime(EngineError):
    """Sampling has reached ``SamplingParams.until``; what was sampled is gone."""


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of completions.

    ``temperature`` 0 means greedy. ``top_k`` 0 and ``top_p`` 1 and ``min_p`` 0 mean off. ``seed`` makes the rollouts
    repeatable; None takes the global generator. ``stop_token_ids`` end a completion and are kept as its last token.
    No token is sampled after ``until`` (``time.monotonic``): ``OutOfTime``.
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
    until: float | None = None

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
    ``stop`` (stop token or stop string, kept as part of the completion) or ``length`` (truncated). ``sampled`` says of each
    token whether the policy sampled it (None: all); the others have NaN as log-prob. ``turns`` are the exchanges they come from.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    sampled: list[bool] | None = None
    turns: tuple[Turn, ...] = ()


class Turns(Protocol):
    """Replies to the rows of one ``generate`` call; row r is completion r % group_size of prompt r // group_size.

    ``stop_strings`` hand over to ``reply`` where a row completes one of them.
    """

    stop_strings: tuple[str, ...]

    def begin(self, rows: int) -> None:
        """Forget everything and expect ``rows`` rows; an engine that ran out of memory begins again."""

    def reply(self, row: int, token_ids: list[int], ended: bool) -> Iterator[int] | None:
        """Return the tokens to append to a row, or None to end it.

        Args:
            row: The row.
            token_ids: What the policy sampled since the row's last reply.
            ended: The row ends here on its own (a stop token, a stop string of the request); else by one of ``stop_strings``.

        Returns:
            Token ids, taken one a step; none of them continues the row as if nothing had been. None ends it.
        """

    def turns_of(self, row: int) -> tuple[Turn, ...]:
        """Return the exchanges of a row so far."""


Prompts = Sequence[Sequence[int]]
"""P token-id lists, each distinct prompt once, without padding."""
Completions = list[list[Completion]]
"""``group_size`` completions for each prompt, in the order of the prompts."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine, besides the model.

    Attributes:
        token_budget: Most tokens in the cache at a time; None for what fits.
        section: The recipe's ``grpo`` section, where there is one: it has the keys that extensions add.
        together: All processes of a distributed group sample at the same time.
    """

    token_budget: int | None = None
    section: GRPOSection | None = None
    together: bool = False


class RolloutEngine(Protocol):
    """Samples completions from the policy. Every engine passes ``tests/unit/rollouts/test_conformance.py``.

    An engine may have ``share()``: how much of the call that runs is done, between 0 and 1, and ``tokens()`` sampled in it; both
    asked from another thread.
    """

    name: str

    def generate(
        self, prompts: Prompts, group_size: int, params: SamplingParams, turns: Turns | None = None
    ) -> Completions:
        """Sample ``group_size`` completions for each prompt.

        Args:
            prompts: See ``Prompts``.
            group_size: Completions per prompt.
            params: Sampling settings; ``max_new_tokens`` counts the tokens of turns too.
            turns: Who replies inside a completion (tools, an environment); None for nobody.

        Raises:
            EngineError: The engine cannot do what was asked (empty prompt, prompt longer than the context, …).
        """
        ...
