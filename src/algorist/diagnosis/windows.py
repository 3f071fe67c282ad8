"""Windows over a run's series: what is recent, what was first, whether two of them differ by more than noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from algorist.diagnosis.signals import Batch, Moments

T = TypeVar("T")

MIN_STEPS = 3
"""Fewer steps say nothing about a run."""
MIN_GROUPS = 16
"""Groups in a window: with 16, a share of 0.9 is far from what chance does to a run with a third of useful groups."""
QUARTER = 4
"""The recent window is the last quarter of the steps, the first window the first quarter (at most ``LONGEST_FIRST``)."""
LONGEST_FIRST = 20


def recent(batches: Sequence[Batch]) -> list[Batch]:
    """Return the last quarter of the batches, grown to ``MIN_STEPS`` and ``MIN_GROUPS``; empty when there are fewer."""
    count = max(MIN_STEPS, len(batches) // QUARTER)
    while count < len(batches) and sum(b.groups for b in batches[-count:]) < MIN_GROUPS:
        count += 1
    window = list(batches[-count:])
    return window if len(window) >= MIN_STEPS and sum(b.groups for b in window) >= MIN_GROUPS else []


def ends(values: Sequence[T]) -> tuple[list[T], list[T]]:
    """Return the first and the last values of a series, not overlapping; empty when it has fewer than 6."""
    count = max(MIN_STEPS, len(values) // QUARTER)
    if len(values) < 2 * count:
        return [], []
    return list(values[: min(count, LONGEST_FIRST)]), list(values[-count:])


def middle(pairs: Sequence[tuple[int, float]]) -> float:
    """Return the median value of (step, value) pairs; NaN without any."""
    return median(v for _, v in pairs) if pairs else math.nan


def last_quarter(pairs: Sequence[tuple[int, float]]) -> float | None:
    """Return the median of the last quarter of (step, value) pairs; None with fewer than ``MIN_STEPS``."""
    return middle(pairs[-max(MIN_STEPS, len(pairs) // QUARTER) :]) if len(pairs) >= MIN_STEPS else None


def pooled(batches: Sequence[Batch], get: Callable[[Batch], Moments]) -> Moments:
    """Return the moments of all groups of the batches."""
    return sum((get(b) for b in batches), Moments())


def z_score(before: Moments, after: Moments, *, least_variance: float) -> float:
    """Return (mean after − mean before) in standard errors, with the groups as independent units.

    ``least_variance`` keeps a few equal groups from looking certain.
    """
    if not before.n or not after.n:
        return 0.0
    degrees = before.n + after.n - 2
    inside = before.variance * (before.n - 1) + after.variance * (after.n - 1)
    variance = max(inside / degrees if degrees > 0 else 0.0, least_variance)
    return (after.mean - before.mean) / math.sqrt(variance * (1 / before.n + 1 / after.n))


@dataclass(frozen=True, slots=True)
class Break:
    """The step from which on a series is lower: means before and after, and the difference in standard errors."""

    step: int
    before: float
    after: float
    z: float
    index: int


def steepest_drop(
    batches: Sequence[Batch], get: Callable[[Batch], Moments], *, least_variance: float = 0.01
) -> Break | None:
    """Return where a series falls most surely: everything before a step against everything from it on.

    A run that recovers has a high mean afterwards, so it is not taken for one that broke.
    """
    whole, before = pooled(batches, get), Moments()
    steepest: Break | None = None
    for index in range(1, len(batches) - MIN_STEPS + 1):
        before = before + get(batches[index - 1])
        after = whole - before
        z = z_score(before, after, least_variance=least_variance)
        if after.n and before.n and (steepest is None or z < steepest.z):
            steepest = Break(batches[index].step, before.mean, after.mean, z, index)
    return steepest
