"""Two evaluations of the same problems, paired: difference with interval, McNemar's test, flipped problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from algorist.errors import DataError
from algorist.evaluation.estimators import Interval, paired_difference

COLUMNS = {"greedy_accuracy": "correct", "format": "well_formed", "truncated": "truncated", "mean_tokens": "tokens"}


def paired_metrics(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> dict[str, Interval]:
    """Return after - before for each greedy metric, over the problems, with a 95 % interval.

    Raises:
        DataError: The two do not hold the same problems.
    """
    first, second = _greedy(before), _greedy(after)
    if first.keys() != second.keys():
        raise DataError(
            f"the evaluations hold different problems ({len(first.keys() - second.keys())} only in the first, "
            f"{len(second.keys() - first.keys())} only in the second); evaluate both on the same dataset and limit"
        )
    return {
        name: paired_difference([float(r[column]) for r in first.values()], [float(second[i][column]) for i in first])
        for name, column in COLUMNS.items()
    }


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided exact p-value of ``gained`` against ``lost`` flipped problems."""
    n = gained + lost
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, i) for i in range(min(gained, lost) + 1)) / 2**n
    return min(1.0, 2 * tail)


def flipped(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the ids of the problems that turned right and those that turned wrong."""
    first, second = _greedy(before), _greedy(after)
    gained = [i for i in first if i in second and second[i]["correct"] and not first[i]["correct"]]
    lost = [i for i in first if i in second and first[i]["correct"] and not second[i]["correct"]]
    return gained, lost


def _greedy(samples: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {r["problem_id"]: r for r in samples if r["greedy"]}
