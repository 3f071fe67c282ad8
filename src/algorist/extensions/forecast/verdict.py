"""A forecast in words: what to expect of a run, until when, whether to train it, and what else to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from algorist.diagnosis.rule import Share
from algorist.extensions.forecast.fit import Fitted, Gain, Row, features, pass_rates

TRAIN, SFT, TEACHER, DO_NOT = "train", "SFT first", "a teacher pays more", "do not train this"
WORTH = 0.01
"""Gain below which hours are not worth it."""
FAR, RUIN = 0.12, 0.5
"""Nats by which a sampled token's log-prob falls in the trial of a rate that is too large where no gain is expected, and of any."""
STILL = 0.0003
"""Nats below which a trial has not moved the policy."""
FOLLOWS = 0.2
"""Correlation below which advantages do not follow correctness."""
NEVER, RARELY = 0.1, 0.3
"""pass@k below which there is nothing to reinforce, and below which most problems offer nothing."""
UNREAD = 0.5
"""Share of unreadable answers from which the form comes first."""
LONG = 1e6
"""Work of a run without end."""
MOST_OF_IT = 0.9


@dataclass(frozen=True)
class Errors:
    """Errors of a forecast on sealed runs, after a fit to the others.

    Attributes:
        fitted, sealed: Numbers of runs.
        covered: Share of the sealed whose gain lies in the interval.
        off: Median absolute error, in shares.
        width: Median width of the interval.
        lost, warned: Sealed runs that lost beyond chance, and how many of these were warned of.
        healthy, alarms: Sealed runs that gained beyond chance, and how many of these were warned of.
    """

    fitted: int
    sealed: int
    covered: float
    off: float
    width: float
    lost: int
    warned: int
    healthy: int
    alarms: int


def errors_of(rows: Sequence[Row]) -> Errors:
    """Fit to the runs that are not sealed, and forecast those that are."""
    model, sealed = Fitted([row for row in rows if not row["sealed"]]), [row for row in rows if row["sealed"]]
    gains = [model.forecast(row) for row in sealed]
    warned = [verdict(row, gain)[0] in (SFT, DO_NOT) for row, gain in zip(sealed, gains, strict=True)]
    lost = [row["gain"][2] < 0 for row in sealed]
    healthy = [row["gain"][1] > 0 for row in sealed]
    return Errors(
        fitted=len(rows) - len(sealed),
        sealed=len(sealed),
        covered=float(np.mean([g.low <= r["gain"][0] <= g.high for r, g in zip(sealed, gains, strict=True)])),
        off=median(abs(g.value - r["gain"][0]) for r, g in zip(sealed, gains, strict=True)),
        width=median(g.high - g.low for g in gains),
        lost=sum(lost),
        warned=sum(w for w, which in zip(warned, lost, strict=True) if which),
        healthy=sum(healthy),
        alarms=sum(w for w, which in zip(warned, healthy, strict=True) if which),
    )


def verdict(row: Row, gain: Gain) -> tuple[str, str]:
    """Return the advice in words, and its reason."""
    any_of_k = pass_rates(row)[1]
    both = ", and the interval leaves gain and loss open" if gain.low < 0 < gain.high else ""
    points = f"{100 * gain.value:+.1f} points are expected{both}"
    drift = row["drift"] / row["tokens"]
    rarely = f"only {Share(any_of_k)} of the problems are right in one of {row['samples']} samples; {points}"
    if drift > (FAR if gain.value < WORTH else RUIN):
        return (
            DO_NOT,
            f"{row['tried']} steps make a sampled token {drift:.2f} nats less likely: the rate is too large, try a fifth of it",
        )
    if row["unread"] > UNREAD and any_of_k < RARELY:
        return SFT, f"{Share(row['unread'])} of the completions have no answer that can be read"
    if not row["teacher"] and row["agree"] < FOLLOWS and any_of_k >= NEVER:
        return (
            DO_NOT,
            f"advantages hardly follow correctness (correlation {row['agree']:.2f}): the rewards pay for something else: algorist rewards audit",
        )
    if any_of_k < (NEVER if gain.value >= WORTH else RARELY):
        return SFT, rarely
    if abs(drift) < STILL:
        return (
            DO_NOT,
            f"{row['tried']} steps hardly move the policy ({drift:.5f} nats a token): the rate is too small, try ten times as much",
        )
    if gain.value < WORTH:
        return DO_NOT, points
    return (TEACHER, rarely) if any_of_k < RARELY and not row["teacher"] else (TRAIN, points)


def steps_to_most(row: Row) -> int:
    """Return the step at which nine tenths of the run's own trend are reached, at an even rate."""
    whole, steps = features(row)[0], int(row["steps"])
    for step in range(1, steps):
        if abs(features(row, work=row["work"] * step / steps)[0]) >= MOST_OF_IT * abs(whole):
            return step
    return steps


def nearest(rows: Sequence[Row], row: Row, count: int = 3) -> list[Mapping[str, Any]]:
    """Return the finished runs whose numbers before were most like these."""

    def place(one: Row) -> np.ndarray[Any, Any]:
        return np.array([*pass_rates(one), *features(one), math.log10(one["parameters"]) / 3])

    here = place(row)
    size = np.std([place(one) for one in rows], axis=0) + 1e-9
    return sorted(rows, key=lambda one: float(np.sum(((place(one) - here) / size) ** 2)))[:count]
