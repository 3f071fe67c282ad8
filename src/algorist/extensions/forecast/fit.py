"""A model of few parameters over finished runs: the gain from numbers before, and an interval that held on runs that it had not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from algorist.evaluation.estimators import pass_at_k, share_interval

COVERAGE, A_POINT = 0.9, 0.01
RIDGE = 1.0
"""Penalty of the weight of a feature in units of its size, as one more run that says it is 0."""
FLOOR = 0.1
"""Spread of a gain where nothing can be learned: what an evaluation's own error leaves."""
MOVES, RUINS = 0.1, 3.0
"""Nats by which the log-prob of a sampled token falls over a run that makes use of what it can learn, and over one that ruins the policy."""
Row = Mapping[str, Any]
Floats = NDArray[np.float64]


def pass_rates(row: Row) -> tuple[float, float]:
    """Return pass@1 and pass@k of a row."""
    right, k = row["right"], row["samples"]
    return float(np.mean(right)) / k, float(np.mean([pass_at_k(k, count, k) for count in right]))


def saturating(change: float, up: float, down: float) -> float:
    """Return a change that bends before it reaches ``up`` or −``down``."""
    room = up if change > 0 else down
    return math.copysign(room * -math.expm1(-abs(change) / room), change) if room > 0 else 0.0


def features(row: Row, work: float | None = None) -> Floats:
    """Return the numbers that a gain is read from (4,).

    ``trend``: the trial's shift continued over the run's learning rates, up to pass@k. ``tried``: what the problems sampled again show.
    ``spread``: that of ``without_trial``, for a policy that moves as far. ``ruin``: how much of pass@1 one loses that moves too far.
    """
    once, any_of_k = pass_rates(row)
    work = work or row["work"]
    trend = saturating(row["shift"] * work, any_of_k - once, once)
    tried = float(np.mean(row["right_after"])) / row["samples"] - once
    path = max(0.0, row["drift"]) / row["tokens"] * work
    spread = without_trial(row)[0] * -math.expm1(-path / MOVES)
    return np.array([trend, tried, spread, once * math.expm1(-path / RUINS)])


def without_trial(row: Row, work: float | None = None) -> Floats:
    """Return the gap between pass@1 and pass@k, times the agreement of advantage and correctness: known before a step is tried (1,)."""
    once, any_of_k = pass_rates(row)
    return np.array([row["agree"] * row["useful"] * (any_of_k - once)])


def scale(row: Row) -> float:
    """Return the spread that is expected of a gain: the standard deviation of right and wrong within a problem."""
    p = np.array(row["right"]) / row["samples"]
    return FLOOR + float(np.sqrt(np.mean(p * (1 - p))))


@dataclass(frozen=True)
class Gain:
    """A forecast gain, in shares: the expected one, its 90 % interval, and the probability that the run loses a point or more."""

    value: float
    low: float
    high: float
    loss: float


class Fitted:
    """Ridge regression over finished runs, with leave-one-out intervals.

    Source: the jackknife+ of Barber, Candès, Ramdas and Tibshirani (2021), Annals of Statistics 49: 1 − 2α at least for exchangeable
    runs, and about 1 − α for a stable fit; residuals in units of ``scale`` (Lei et al. 2018, JASA 113).
    """

    def __init__(self, rows: Sequence[Row], features: Callable[..., Floats] = features) -> None:
        self._features = features
        self._x = np.array([features(row) for row in rows])
        self._y = np.array([row["gain"][0] for row in rows])
        self._spread = np.array([scale(row) for row in rows])
        self.weights = self._solve(np.ones(len(rows), dtype=bool))
        each = ~np.eye(len(rows), dtype=bool)
        self._without = np.array([self._solve(others) for others in each])
        self.left_out = np.sum(self._x * self._without, axis=1)
        """The gain of each run, forecast from all others."""
        self._residuals = (self._y - self.left_out) / self._spread

    def _solve(self, of: NDArray[np.bool_]) -> Floats:
        """Return the weights (features,) by some rows, which count by 1 / scale².

        No intercept: where nothing moves, nothing is gained. No weight is negative: a feature that would have one is left out.
        """
        x, y = self._x[of] / self._spread[of, None], self._y[of] / self._spread[of]
        size = np.sqrt(np.mean(x**2, axis=0)) + 1e-9
        weights, used, z = np.zeros(x.shape[1]), np.ones(x.shape[1], dtype=bool), x / size
        while used.any():
            part = z[:, used]
            weights[used] = np.linalg.solve(part.T @ part + RIDGE * np.eye(part.shape[1]), part.T @ y)
            if weights.min() >= 0:
                break
            used, weights = used & (weights > 0), np.zeros_like(weights)
        return weights / size

    def forecast(self, row: Row, work: float | None = None) -> Gain:
        """Return the gain to expect of a run; ``work`` in place of the row's for a longer one."""
        x, spread = self._features(row, work), scale(row)
        centres = self._without @ x
        draws = centres + spread * self._residuals
        wide = np.abs(self._residuals) * spread
        rank = math.ceil(COVERAGE * (len(wide) + 1)) - 1
        high = np.sort(centres + wide)[min(rank, len(wide) - 1)]
        low = np.sort(centres - wide)[max(0, len(wide) - 1 - rank)]
        start = share_interval([count / row["samples"] for count in row["right"]])
        value, low, high = (
            float(np.clip(share, -start.high, 1 - start.low)) for share in (self.weights @ x, low, high)
        )
        return Gain(value, low, high, loss=float(np.mean(draws < -A_POINT)))
