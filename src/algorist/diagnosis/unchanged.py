"""Weights that do not change: without a gradient, frozen, in an adapter that is not trained, in 16 bit; and code that does it."""

from __future__ import annotations

from typing import Any

from algorist.diagnosis.course import rises
from algorist.diagnosis.facts import MOVING_STEPS
from algorist.diagnosis.rule import Facts
from algorist.diagnosis.weights import MOVED_SHARE

MOST_STILL = 0.5
"""Share of the weights that are as they were while others move: somebody has frozen them."""
LOSS = "dapo"
"""The loss that takes the place of a user's own: the default."""


def weights_unchanged(f: Facts) -> bool:
    still = f.get("zero_gradient") and f["same_reward"] < 0.5
    same = f.get("empty_adapter") or f.get("moved_share", 1.0) < MOVED_SHARE or is_frozen(f)
    return still or (same and f["steps_with_gradient"] >= MOVING_STEPS)


def is_frozen(f: Facts) -> bool:
    whole = f.stage == "grpo" and not f.get("half")  # 16 bits round small steps away
    return whole and f.get("still", 0.0) >= MOST_STILL and not rises(f)


def in_the_way(f: Facts) -> dict[str, Any]:
    """Return the changes that take the user's own code out which a gradient that is lost passes: a loss, plugins."""
    if not (f.get("zero_gradient") or is_frozen(f)):
        return {}
    own = {"grpo.loss": LOSS} if ":" in str(f.settings.get("grpo.loss.name", "")) else {}
    return own | ({"plugins": []} if f.settings.get("plugins") else {})


def why_unchanged(f: Facts) -> str:
    own = " and ".join(in_the_way(f))
    if own and f.get("zero_gradient"):
        return f"The weights did not change: their gradient is 0, and code of your own is in its way ({own})."
    if own:
        return f"Most weights did not change: they are frozen, maybe by code of your own ({own})."
    return (
        "The weights did not change: they are frozen, the adapter is not the one that is trained or saved, or bfloat16 weights "
        "round every update away."
    )
