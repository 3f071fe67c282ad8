"""A line of preflight: the gain to expect from what it has sampled, before a step is tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from algorist.extensions.forecast.agreement import Agreement, right_of
from algorist.extensions.forecast.fit import Fitted, without_trial
from algorist.extensions.forecast.table import read_table
from algorist.preflight.completions import JUDGED
from algorist.types import Group


def preview(groups: Sequence[Group]) -> Mapping[str, Any] | None:
    """Return the row of the table, and the numbers; None of fewer problems than can be judged."""
    if len(groups) < JUDGED:
        return None
    agreement = Agreement()
    for group in groups:
        agreement.add(group, [rollout.reward or 0.0 for rollout in group.rollouts])
    row = {
        "right": [int(right_of(group).sum()) for group in groups],
        "samples": len(groups[0].rollouts),
        "agree": agreement.value,
        "useful": agreement.useful,
    }
    gain = Fitted(read_table(), without_trial).forecast(row)
    value, low, high = (f"{100 * share:+.1f}" for share in (gain.value, gain.low, gain.high))
    text = f"{value} points [{low}, {high}] by GRPO on runs like those of the table (90 %); with a trial: algorist forecast"
    return {"rows": {"to expect": text}, "advice": [], "gain": asdict(gain)}
