"""Rewards for the shape of a text: visible steps, and no repetition."""

from __future__ import annotations

import re

from algorist.errors import ConfigError
from algorist.rewards.base import reward

_STEPS = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,", re.MULTILINE)


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
