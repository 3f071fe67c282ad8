"""Numbers with honest intervals: accuracy, pass@k, maj@k; the problem is the unit of sampling.

Every metric is a mean over problems of a per-problem value, so several samples of one problem count as one cluster.
Intervals are 95 %: Wilson's for shares of single outcomes, Student's t over problems otherwise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval and the number of problems behind it."""

    value: float
    low: float
    high: float
    n: int


def wilson(successes: int, n: int) -> Interval:
    """Return Wilson's score interval of a share.

    Source: Wilson (1927), Journal of the American Statistical Association 22.
    """
    if n == 0:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    p, z2 = successes / n, Z95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half), n)


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of per-problem values with a 95 % t interval."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return Interval(float(x.mean()) if len(x) else float("nan"), float("nan"), float("nan"), len(x))
    half = _t95(len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return Interval(float(x.mean()), float(x.mean()) - half, float(x.mean()) + half, len(x))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of P(at least one of k samples is right) from ``correct`` of ``n``.

    Source: Chen et al. (2021), equation 1.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; expected 1 … n ({n})")
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def summarise(samples: Sequence[dict[str, Any]], ks: Sequence[int] = (1, 4, 8)) -> dict[str, Interval]:
    """Return the metrics of an evaluation from its rows."""
    greedy = [r for r in samples if r["greedy"]]
    found = {
        "greedy_accuracy": wilson(sum(bool(r["correct"]) for r in greedy), len(greedy)),
        "format": wilson(sum(bool(r["well_formed"]) for r in greedy), len(greedy)),
        "truncated": wilson(sum(bool(r["truncated"]) for r in greedy), len(greedy)),
        "mean_tokens": mean_interval([float(r["tokens"]) for r in greedy]),
    }
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in samples:
        if not row["greedy"]:
            groups.setdefault(row["problem_id"], []).append(row)
    if groups:
        size = min(map(len, groups.values()))
        for k in ks:
            if k <= size:
                values = [pass_at_k(len(g), sum(bool(r["correct"]) for r in g), k) for g in groups.values()]
                found[f"pass@{k}"] = mean_interval(values)
        found[f"maj@{size}"] = mean_interval([_majority(g) for g in groups.values()])
    return found


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Return the mean of after - before over the same problems with a 95 % t interval."""
    if len(before) != len(after):
        raise ValueError(f"{len(before)} values before, {len(after)} after; expected the same problems in both")
    return mean_interval(list(np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)))


def _majority(group: Sequence[dict[str, Any]]) -> float:
    """Return 1 when the most frequent answer is right; ties share."""
    counts = Counter(r["extracted"] for r in group if r["extracted"] is not None)
    if not counts:
        return 0.0
    best = max(counts.values())
    winners = [a for a, n in counts.items() if n == best]
    right = {r["extracted"] for r in group if r["correct"]}
    return sum(a in right for a in winners) / len(winners)


def _t95(degrees: int) -> float:
    """Return the 97.5 % point of Student's t (Cornish-Fisher; error below 0.001 from 4 degrees on)."""
    table = {1: 12.706, 2: 4.303, 3: 3.182}
    if degrees in table:
        return table[degrees]
    z, d = Z95, degrees
    return z + (z**3 + z) / (4 * d) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * d**2) + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * d**3)
