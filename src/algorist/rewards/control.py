"""Rewards for controls: what a run gains under them, it does not owe to being right."""

from __future__ import annotations

import hashlib

from algorist.errors import ConfigError
from algorist.rewards.base import reward


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
