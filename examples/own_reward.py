"""A reward of your own: one function, named in a recipe as `file.py:function`.

Use it, in the folder above this one:

    algorist run quickstart 'rewards=[{name: correct}, {name: "examples/own_reward.py:shows_work", weight: 0.2}]'
"""

from __future__ import annotations

from algorist.types import Rollout


def shows_work(rollout: Rollout) -> float:
    """Return 0.25 when the completion writes at least one equation before its answer."""
    return 0.25 if "=" in (rollout.parsed.reasoning or "") else 0.0
