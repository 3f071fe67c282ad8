"""The basic rewards: for being right, for the format, for length, against repetition, and the random control."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from algorist.errors import ConfigError
from algorist.rewards.base import reward
from algorist.types import Parsed, Problem, Rollout
from algorist_grader import grade


@reward("correct", low=0.0, high=1.0, source="algorist_grader")
def correct(
    rollout: Rollout, *, parsed: Parsed, gold: str, matcher: str = "symbolic", problem: Problem | None = None
) -> float:
    """1 when the grader finds the parsed answer equal to the gold answer, else 0; the default reward.

    Two different answers are ambiguous and worth 0. Where the problem names a checker, that decides.
    """
    if "several_answers" in parsed.flags:
        return 0.0
    row, verdict = problem.columns() if problem is not None else {}, rollout.grade
    # A verdict that the grader does not remember may be another one when it is asked again.
    if verdict is None or verdict.gold != gold or not (row.get("checker") or verdict.is_unfinished):
        verdict = grade(parsed.answer, gold, matcher=matcher, problem=row)
    return float(verdict.correct)


@reward(
    "repetition",
    low=-0.1,
    high=0.0,
    aliases=("repetition_penalty",),
    bounds=lambda max_penalty, **_: (max_penalty, 0.0),
    source="the R1-Zero reproduction",
)
def repetition(
    completion: str,
    *,
    ngram: Annotated[int, Field(ge=1, le=1000)] = 3,
    max_penalty: Annotated[float, Field(le=0)] = -0.1,
) -> float:
    """``max_penalty`` × the share of n-grams of lower-cased words that occurred before; 0 for fewer than n words."""
    words = completion.lower().split()
    grams = list(zip(*(words[i:] for i in range(ngram)), strict=False))
    return (1 - len(set(grams)) / len(grams)) * max_penalty if grams else 0.0


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


@reward("target_length", low=-1.0, high=0.0, source="L1 (2503.04697) eq. 1")
def target_length(
    completion: str,
    *,
    completion_ids: Sequence[int],
    target_tokens: Annotated[int, Field(ge=1)] = 128,
    alpha: Annotated[float, Field(ge=0)] = 0.003,
) -> float:
    """Minus ``alpha`` for each token more or less than ``target_tokens``, at least -1."""
    return max(-1.0, -alpha * abs(len(completion_ids) - target_tokens))


@reward("random", low=0.0, high=1.0, source="Shao et al. (2025), arXiv 2506.10947")
def random_reward(
    completion: str, *, share: Annotated[float, Field(gt=0, lt=1)] = 0.5, seed: int = 0
) -> float:
    """1 for a share of all texts, drawn by a hash of text and ``seed``, else 0: the random-reward control.

    A resumed run draws the same.
    """
    digest = hashlib.sha256(f"{seed}/{completion}".encode("utf-8", "backslashreplace")).digest()
    return float(int.from_bytes(digest[:8], "big") < share * 2**64)


@reward("well_formed", low=0.0, high=1.0, source="algorist.prompts")
def well_formed(completion: str, *, parsed: Parsed) -> float:
    """1 when the completion follows its prompt format exactly, else 0; the default format reward."""
    return float(parsed.well_formed)
