"""The basic rewards: for being right, for visible steps without repetition, for length, and the random control."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence

from algorist.errors import ConfigError
from algorist.grading import grade
from algorist.prompts import Tags
from algorist.rewards.base import reward
from algorist.rewards.extract import plain_float
from algorist.rewards.systems.open_r1 import THINK_TAGS, accuracy
from algorist.types import Parsed, Problem

REASONING_TAGS = Tags("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_HASH = re.compile(r"####\s*(-?\d+(?:,\d{3})*(?:\.\d+)?)")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_STEPS = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,", re.MULTILINE)


@reward("correct", low=0.0, high=1.0, source="algorist.grading")
def correct(
    completion: str,
    *,
    parsed: Parsed,
    gold: str,
    matcher: str = "symbolic",
    problem: Problem | None = None,
) -> float:
    """1 when the grader finds the parsed answer equal to the gold answer, else 0; the default reward.

    Two different answers are ambiguous and worth 0. Where the problem names a checker, that decides.
    """
    if "several_answers" in parsed.flags:
        return 0.0
    row = problem.columns() if problem is not None else None
    return float(grade(parsed.answer, gold, matcher=matcher, problem=row).correct)


def tagged_or_hash(text: str, tags: Tags = REASONING_TAGS) -> str:
    """Return the first answer block, else the number behind ``####``, else the whole text; stripped (S0.32)."""
    low = text.lower() if text.isascii() else text  # lower() may change the length of other texts
    start = low.find(tags.answer_open.lower())
    end = low.find(tags.answer_close.lower(), start) if start >= 0 else -1
    if end >= 0:
        return text[start + len(tags.answer_open) : end].strip()
    match = _HASH.search(text)
    return match[1] if match else text.strip()


@reward("correctness_numeric", low=0.0, high=1.0, source="S0.29, S0.33")
def correctness_numeric(
    completion: str, *, gold: str, tags: Tags = REASONING_TAGS, tolerance: float = 1e-6
) -> float:
    """1 when answer and gold are close as floats (relative or absolute), or equal as texts if one is no number.

    Both sides are read in the same way: the answer block, else the number behind ``####``, else the whole text; "1,080" is 1080.
    """
    answer, truth = tagged_or_hash(completion, tags), tagged_or_hash(gold, tags)
    left, right = (
        plain_float(text.replace(",", "") if _GROUPED.fullmatch(text) else text) for text in (answer, truth)
    )
    if left is None or right is None:
        return float(answer == truth)
    return float(math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance))


@reward("numeric", low=0.0, high=1.0, source="S0.30")
def numeric(completion: str, *, tags: Tags = REASONING_TAGS, finite_only: bool = True) -> float:
    """1 when the answer is a number that ``float`` reads, else 0; "1e3" is one, "1,000" is not.

    ``finite_only`` False also takes "nan" and "inf", as the original does.
    """
    answer = tagged_or_hash(completion, tags)
    if not finite_only and re.fullmatch(r"[-+]?(nan|inf|infinity)", answer, re.IGNORECASE):
        return 1.0
    return float(plain_float(answer) is not None)


def last_tagged(text: str, tags: Tags = REASONING_TAGS) -> str:
    """Return what follows the last opening answer tag, up to the next closing one; without tags the text (S2.6)."""
    return text.rpartition(tags.answer_open)[2].partition(tags.answer_close)[0].strip()


@reward("correctness_exact", low=0.0, high=2.0, aliases=("correctness",), source="S2.7")
def correctness_exact(completion: str, *, gold: str, tags: Tags = REASONING_TAGS) -> float:
    """2 when the last answer is the gold text, character by character, else 0 ("5.0" is not "5")."""
    return 2.0 * (last_tagged(completion, tags) == gold)


@reward("int", low=0.0, high=0.5, source="S2.8")
def integer(completion: str, *, tags: Tags = REASONING_TAGS) -> float:
    """0.5 when the last answer consists of digits only, else 0; no sign, no comma."""
    answer = last_tagged(completion, tags)
    return 0.5 * (answer.isascii() and answer.isdigit())


@reward("reasoning_steps", low=0.0, high=1.0, source="S4.19")
def reasoning_steps(completion: str, *, steps: int = 3) -> float:
    """The number of marked steps, up to ``steps``, as a share of it.

    Marks are "Step 1:", a number with a dot or a hyphen or an asterisk at the start of a line, and "First,",
    "Second,", "Next,", "Finally,".
    """
    return min(1.0, len(_STEPS.findall(completion)) / max(1, steps))


def _repetition_bounds(*, ngram: int, max_penalty: float) -> tuple[float, float]:
    if max_penalty > 0:
        raise ConfigError(f"reward 'repetition' has max_penalty {max_penalty}; expected 0 or less, e.g. -0.1")
    if ngram < 1:
        raise ConfigError(f"reward 'repetition' has ngram {ngram}; expected 1 or more, usually 3")
    return max_penalty, 0.0


@reward(
    "repetition",
    low=-0.1,
    high=0.0,
    aliases=("repetition_penalty",),
    bounds=_repetition_bounds,
    source="S4.21",
)
def repetition(completion: str, *, ngram: int = 3, max_penalty: float = -0.1) -> float:
    """``max_penalty`` × the share of n-grams of lower-cased words that occurred before; 0 for fewer than n words."""
    _repetition_bounds(ngram=ngram, max_penalty=max_penalty)
    words = completion.lower().split()
    grams = list(zip(*(words[i:] for i in range(ngram)), strict=False))
    return (1 - len(set(grams)) / len(grams)) * max_penalty if grams else 0.0


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


@reward("random", low=0.0, high=1.0, source="Shao et al. (2025), arXiv 2506.10947")
def random_reward(completion: str, *, share: float = 0.5, seed: int = 0) -> float:
    """1 for a share of all texts, drawn by a hash of the text and ``seed``, else 0: the random-reward control.

    It knows neither the problem nor the answer, and a resumed run draws the same.
    """
    if not 0 < share < 1:
        raise ConfigError(
            f"reward 'random' has share {share}; expected more than 0 and less than 1, usually 0.5"
        )
    digest = hashlib.sha256(f"{seed}/{completion}".encode("utf-8", "backslashreplace")).digest()
    return float(int.from_bytes(digest[:8], "big") < share * 2**64)
