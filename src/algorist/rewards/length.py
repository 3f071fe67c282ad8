"""Rewards that depend on the length of a completion."""

from __future__ import annotations

import math
from collections.abc import Sequence

from algorist.errors import ConfigError
from algorist.prompts import Tags
from algorist.rewards.base import reward
from algorist.rewards.systems.open_r1 import THINK_TAGS, accuracy


def _cosine_bounds(*, max_len: int, flipped: bool, **ends: float) -> tuple[float, float]:
    if max_len < 1:
        raise ConfigError(
            f"reward 'cosine' has max_len {max_len}; expected a number of characters, usually 1000"
        )
    return min(ends.values()), max(ends.values())


@reward("cosine", low=-0.5, high=1.0, bounds=_cosine_bounds, source="S4.20, S4.23")
def cosine(
    completion: str,
    *,
    gold: str,
    matcher: str = "symbolic",
    tags: Tags = THINK_TAGS,
    max_len: int = 1000,
    correct_short: float = 1.0,
    correct_long: float = 0.8,
    wrong_short: float = -0.5,
    wrong_long: float = -0.1,
    flipped: bool = False,
) -> float:
    """A cosine from the short to the long value over ``max_len`` characters, by the ``accuracy`` of the completion.

    Short correct texts earn most, short wrong texts lose most: a wrong answer should at least have tried.
    ``flipped`` makes long wrong texts lose most. Longer texts than ``max_len`` count as ``max_len``.
    """
    if accuracy(completion, gold=gold, matcher=matcher, tags=tags) > 0.5:
        low, high = correct_long, correct_short
    else:
        low, high = (wrong_short, wrong_long) if flipped else (wrong_long, wrong_short)
    share = min(1.0, len(completion) / max_len)
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * share))


def _overlong_bounds(*, max_tokens: int, cache_tokens: int) -> tuple[float, float]:
    if not 0 <= cache_tokens <= max_tokens:
        raise ConfigError(
            f"reward 'soft_overlong' has cache_tokens {cache_tokens} and max_tokens {max_tokens}; "
            "expected 0 <= cache_tokens <= max_tokens"
        )
    return -1.0, 0.0


@reward("soft_overlong", low=-1.0, high=0.0, bounds=_overlong_bounds, source="DAPO (2503.14476) eq. 13")
def soft_overlong(
    completion: str, *, completion_ids: Sequence[int], max_tokens: int = 256, cache_tokens: int = 64
) -> float:
    """0 up to ``max_tokens - cache_tokens`` tokens, then linearly down to -1 at ``max_tokens`` and beyond."""
    free = max_tokens - cache_tokens
    if len(completion_ids) <= free:
        return 0.0
    return -1.0 if len(completion_ids) > max_tokens else (free - len(completion_ids)) / cache_tokens


def _target_bounds(*, target_tokens: int, alpha: float) -> tuple[float, float]:
    if target_tokens < 1 or alpha < 0:
        raise ConfigError(
            f"reward 'target_length' has target_tokens {target_tokens} and alpha {alpha}; expected at least 1 and 0"
        )
    return -1.0, 0.0


@reward("target_length", low=-1.0, high=0.0, bounds=_target_bounds, source="L1 (2503.04697) eq. 1")
def target_length(
    completion: str, *, completion_ids: Sequence[int], target_tokens: int = 128, alpha: float = 0.003
) -> float:
    """Minus ``alpha`` for each token more or less than ``target_tokens``, at least -1."""
    return max(-1.0, -alpha * abs(len(completion_ids) - target_tokens))
