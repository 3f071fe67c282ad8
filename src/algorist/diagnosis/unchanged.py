"""Weights that do not change: without a gradient, frozen, in an adapter that is not trained, in 16 bit; and code that does it."""

from __future__ import annotations

from typing import Any

from algorist.diagnosis.course import rises
from algorist.diagnosis.facts import MOVING_STEPS
from algorist.diagnosis.rule import Facts
from algorist.diagnosis.weights import MOVED_SHARE
from algorist.errors import AlgoristError
from algorist.objectives import LOSSES

MOST_STILL = 0.9
"""Share of the weights that are as they were, while others moved, from which on the user's code has frozen more than was meant."""
LOSS = "dapo"
"""The loss that takes the place of a user's own: the default."""


def weights_unchanged(f: Facts) -> bool:
    still = f.get("zero_gradient") and f["same_reward"] < 0.5
    same = f.get("empty_adapter") or f.get("moved_share", 1.0) < MOVED_SHARE or is_frozen(f)
    return still or (same and f["steps_with_gradient"] >= MOVING_STEPS)


def is_frozen(f: Facts) -> bool:
    """Return whether nearly all weights are as they were in a run with code of the user's own that does not learn."""
    whole = f.stage == "grpo" and not f.get("half")  # 16 bits round small steps away
    return bool(whole and f.get("still", 0.0) >= MOST_STILL and not rises(f) and _own(f))


def _own(f: Facts) -> dict[str, Any]:
    """Return the changes that take out the user's code which a gradient passes: a loss, plugins."""
    name = str(f.settings.get("grpo.loss.name") or LOSS)
    built_in = name in LOSSES.names() and LOSSES.get(name).function.__module__.startswith("algorist.")
    own = {} if built_in else {"grpo.loss": LOSS}
    return own | ({"plugins": []} if f.settings.get("plugins") else {})


def in_the_way(f: Facts) -> dict[str, Any]:
    """Return these changes where a gradient is lost and the recipe can be read without that code; else none."""
    from algorist.config.load import load_recipe

    changes = _own(f) if f.get("zero_gradient") or is_frozen(f) else {}
    if changes and f.signals.run is not None:
        words = [f"{key}={value}" for key, value in changes.items()]
        try:
            load_recipe(str(f.signals.run / "config.yaml"), words)
        except (AlgoristError, OSError):
            return {}
    return changes


def why_unchanged(f: Facts) -> str:
    own = " and ".join(_own(f))
    if own and f.get("zero_gradient"):
        return f"The weights did not change: their gradient is 0, and code of your own is in its way ({own})."
    if is_frozen(f):
        return f"Most weights did not change: they are frozen, maybe by code of your own ({own})."
    return (
        "The weights did not change: they are frozen, the adapter is not the one that is trained or saved, or bfloat16 weights "
        "round every update away."
    )
