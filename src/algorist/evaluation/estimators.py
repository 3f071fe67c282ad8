"""Numbers with honest intervals: accuracy, pass@k, maj@k; the problem is the unit of sampling.

Every metric is a mean over problems of a per-problem value, so several samples of one problem count as one cluster.
Intervals are 95 %. Shares of problems get Wilson's interval; means of per-problem shares get Wilson's with the
effective number of problems (so that "all wrong" has no interval of width zero); other means Student's t.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from algorist.errors import DataError
from algorist_grader import grade

Z95 = 1.959963984540054
# 97.5 % points of Student's t for 1 … 12 degrees of freedom; beyond, the series in _t95 is exact to 1e-4.
_T95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788)

SHARES = {
    "greedy_accuracy": "correct",
    "lenient_accuracy": "lenient",  # beside the accuracy that it explains
    "format": "well_formed",
    "truncated": "truncated",
    "reasoning_present": "has_reasoning",
}
MEANS = {
    "mean_tokens": "completion_tokens",
    "mean_reasoning_characters": "reasoning_characters",
    "reward": "reward",
}
OPTIONAL = {"lenient", "has_reasoning", "reasoning_characters", "reward"}
"""Columns that some evaluations lack."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval and the number of problems that it rests on; NaN where it is undefined."""

    value: float
    low: float
    high: float
    n: int

    def text(self, metric: str = "", *, signed: bool = False) -> str:
        """Return ``62.0 % [56.1, 67.5]``; lengths and rewards are plain numbers, a ``signed`` share is a difference in points."""
        if math.isnan(self.value):
            return "–"
        factor = 100 if is_share(metric) else 1
        unit = "" if factor == 1 else " points" if signed else " %"
        form = f"{'+' if signed else ''}.{2 if 'reward' in metric or 'score' in metric else 1}f"
        value = f"{factor * self.value:{form}}{unit}"
        if math.isnan(self.low):
            return value
        return f"{value} [{factor * self.low:{form}}, {factor * self.high:{form}}]"


def is_share(metric: str) -> bool:
    """Return whether a metric lies between 0 and 1 and is shown in percent."""
    return not any(
        word in metric for word in ("tokens", "length", "characters", "seconds", "reward", "score")
    )


NOTHING = Interval(math.nan, math.nan, math.nan, 0)


def wilson(successes: float, n: float, *, critical: float = Z95) -> Interval:
    """Return Wilson's score interval of the share ``successes / n``; both may be effective (fractional) counts.

    Source: Wilson (1927), Journal of the American Statistical Association 22.
    """
    if n <= 0:
        return NOTHING
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}; expected 0 … {n}")
    p, z2 = successes / n, critical**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = critical / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(p, low, high, int(n))


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent per-problem values with a Student-t interval; (N,) values.

    One value has no interval (NaN); no values give NaN.
    """
    x = np.asarray(values, dtype=np.float64)
    if len(x) == 0:
        return NOTHING
    mean = float(x.mean())
    if len(x) == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = _t95(len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return Interval(mean, mean - half, mean + half, len(x))


def share_interval(values: Sequence[float]) -> Interval:
    """Return the mean of per-problem shares in [0, 1] with Wilson's interval at the effective number of problems.

    The effective number is p(1 − p) / (s² / N): N − 1 for right-or-wrong values, more when each value is itself a mean
    of several samples. Without spread it is N. Student's quantile with N − 1 degrees of freedom takes the place of 1.96.

    Source: the effective-sample-size interval of Korn and Graubard (1998), with Wilson's in place of Clopper's.
    """
    x = np.asarray(values, dtype=np.float64)
    if len(x) == 0:
        return NOTHING
    if x.min() < 0 or x.max() > 1:
        raise ValueError(f"shares between {x.min()} and {x.max()}; expected values in [0, 1]")
    p, n = float(x.mean()), len(x)
    variance = float(x.var(ddof=1)) if n > 1 else 0.0
    effective = p * (1 - p) * n / variance if variance > 1e-12 else n
    critical = _t95(n - 1) if n > 1 else Z95
    interval = wilson(min(p * effective, effective), effective, critical=critical)
    return Interval(p, interval.low, interval.high, n)


def cluster_mean(values: Sequence[float], clusters: Sequence[Hashable] | None) -> Interval:
    """Return the mean over clusters of the cluster means, with a cluster-robust interval: Student's t over them.

    Args:
        values: (N,) one value per sample.
        clusters: (N,) the problem of each sample.

    Raises:
        DataError: Clusters are missing; a guess would make the interval too narrow.
    """
    return mean_interval(list(cluster_means(values, clusters).values()))


def cluster_means(values: Sequence[float], clusters: Sequence[Hashable] | None) -> dict[Hashable, float]:
    """Return the mean of each cluster, in the order of first appearance.

    Raises:
        DataError: Clusters are missing, None, empty or NaN, or not one per value.
    """
    if clusters is None:
        raise DataError("no cluster labels; give the problem of each sample (problem_id), one per value")
    if len(clusters) != len(values):
        raise DataError(f"{len(values)} values but {len(clusters)} cluster labels; expected one per value")
    groups: dict[Hashable, list[float]] = {}
    for index, (value, cluster) in enumerate(zip(values, clusters, strict=True)):
        if cluster is None or cluster == "" or cluster != cluster:
            raise DataError(f"sample {index} has no cluster label; every sample needs its problem_id")
        groups.setdefault(cluster, []).append(float(value))
    return {cluster: math.fsum(group) / len(group) for cluster, group in groups.items()}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of P(at least one of k samples is right) from ``correct`` of ``n``.

    Source: Chen et al. (2021), "Evaluating large language models trained on code", equation 1.
    """
    if not 0 <= correct <= n:
        raise ValueError(f"{correct} of {n} samples are correct; expected 0 … {n}")
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; expected 1 … n ({n})")
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def summarise(samples: Sequence[Mapping[str, Any]], ks: Sequence[int] = (1, 4, 8)) -> dict[str, Interval]:
    """Return the metrics of an evaluation from its rows (``evaluation.artifact`` tells their columns).

    Greedy rows give ``greedy_accuracy``, ``format``, ``truncated`` and ``mean_tokens``; where the rows tell them also
    ``lenient_accuracy``, ``reasoning_present``, ``mean_reasoning_characters``, the total ``reward`` and each ``rewards/NAME``. Sampled rows give
    ``pass@k`` and ``maj@k`` for each k up to the smallest number of samples that a problem has, and maj@ of that number.

    Raises:
        DataError: A row has no ``problem_id``.
    """
    metrics = _greedy_metrics([r for r in samples if r["greedy"]])
    groups = sampled_groups(samples)
    if not groups:
        return metrics
    size = min(map(len, groups.values()))
    for k in sorted(k for k in set(ks) if 1 <= k <= size):
        rates = [pass_at_k(len(g), sum(bool(r["correct"]) for r in g), k) for g in groups.values()]
        metrics[f"pass@{k}"] = share_interval(rates)
    votes = [_votes(group) for group in groups.values()]
    for k in sorted({k for k in ks if 1 < k <= size} | {size}):
        metrics[f"maj@{k}"] = share_interval([majority_at_k(v, min(k, len(v))) for v in votes])
    return metrics


def _votes(group: Sequence[Mapping[str, Any]]) -> list[tuple[str | None, bool]]:
    """Return (answer, correct) of each sample; answers of equal value and verdict are one, in the words of the first.

    A checker, or a matcher by words, may find one of two equal values right and the other wrong; of a completion with several
    answers, which is wrong, the last one counts.
    """
    answers, right = (
        [row["extracted"] for row in group],
        {row["extracted"] for row in group if row["correct"]},
    )
    if not right:
        return [(answer, False) for answer in answers]  # whatever most of them say
    names = _names(answers, lambda a, b: (a in right) == (b in right) and grade(a, b).correct)
    return [(names.get(row["extracted"]), bool(row["correct"])) for row in group]


def _names(answers: Sequence[str | None], same: Callable[[str, str], bool]) -> dict[str | None, str]:
    """Map each answer to the first one that is the same; None to nothing."""
    names: dict[str | None, str] = {}
    for answer in answers:
        if answer is not None and answer not in names:
            names[answer] = next((n for n in dict.fromkeys(names.values()) if same(answer, n)), answer)
    return names


def _greedy_metrics(greedy: Sequence[Mapping[str, Any]]) -> dict[str, Interval]:
    problems = [r.get("problem_id") for r in greedy]
    metrics: dict[str, Interval] = {}
    for name, column in measured(SHARES, greedy):
        values = cluster_means([float(bool(r[column])) for r in greedy], problems)
        metrics[name] = share_interval(list(values.values()))
    for name, column in measured(MEANS, greedy):
        metrics[name] = cluster_mean([float(r[column]) for r in greedy], problems)
    for name in dict.fromkeys(name for r in greedy for name in r.get("rewards") or ()):
        having = [r for r in greedy if (r.get("rewards") or {}).get(name) is not None]
        values_of = [float(r["rewards"][name]) for r in having]
        metrics[f"rewards/{name}"] = _reward_interval(values_of, [r.get("problem_id") for r in having])
    return metrics


def _reward_interval(values: Sequence[float], problems: Sequence[Hashable]) -> Interval:
    """Return the mean of a reward; one that takes two values, or is 0 or 1, is a share whose interval stays between them."""
    low, high = (0.0, 1.0) if set(values) <= {0.0, 1.0} else (min(values), max(values))
    if low == high or not set(values) <= {low, high}:
        return cluster_mean(values, problems)
    means = cluster_means(values, problems).values()
    share = share_interval([(mean - low) / (high - low) for mean in means])
    value, below, above = (low + (high - low) * x for x in (share.value, share.low, share.high))
    return Interval(value, below, above, share.n)


def measured(metrics: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (metric, column) of those that all ``rows`` have; without rows, those that every evaluation has."""
    return [
        (name, column)
        for name, column in metrics.items()
        if (all(row.get(column) is not None for row in rows) if rows else column not in OPTIONAL)
    ]


def sampled_groups(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the sampled (not greedy) rows of each problem.

    Raises:
        DataError: A row has no ``problem_id``.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in samples:
        if not row["greedy"]:
            if not row.get("problem_id"):
                raise DataError(
                    "a sample has no problem_id; intervals need to know which samples share a problem"
                )
            groups.setdefault(row["problem_id"], []).append(row)
    return groups


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Return the mean of after − before over the same problems with a Student-t interval; (N,) per-problem values."""
    if len(before) != len(after):
        raise DataError(
            f"{len(before)} values before, {len(after)} after; expected the same problems in both"
        )
    return mean_interval(list(np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)))


def paired_rate_difference(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Return ``paired_difference`` of shares of right samples; (N,) shares in [0, 1].

    Where all shares change alike, which is no proof that each would, the interval is that of ``paired_share_difference``, for
    changes of any size: one answer more flips in each direction. No interval goes beyond ±1.
    """
    difference = paired_difference(before, after)
    n, value = difference.n, difference.value
    if n < 2:
        return difference
    if difference.high - difference.low > 1e-9:
        return Interval(value, max(-1.0, difference.low), min(1.0, difference.high), n)
    mean = n * value / (n + 2)
    half = Z95 * math.sqrt(((n * value**2 + 2) / (n + 2) - mean**2) / (n + 2))
    return Interval(value, max(-1.0, mean - half), min(1.0, mean + half), n)


def paired_share_difference(gained: int, lost: int, n: int) -> Interval:
    """Return (gained − lost) / n, the paired difference of two right-or-wrong shares, with its interval.

    The interval adds one problem to each kind of flip, so it keeps its width when few or no answers flip.

    Source: Bonett and Price (2012), "Adjusted Wald confidence interval for a difference of binomial proportions
    based on paired data".
    """
    if n <= 0:
        return NOTHING
    if gained < 0 or lost < 0 or gained + lost > n:
        raise ValueError(
            f"{gained} gained and {lost} lost of {n}; expected two counts that together fit in n"
        )
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = Z95 * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    low, high = max(-1.0, up - down - half), min(1.0, up - down + half)
    return Interval((gained - lost) / n, low, high, n)


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided exact p-value of ``gained`` against ``lost`` flipped problems (binomial, p = ½).

    Source: McNemar (1947), Psychometrika 12; the exact form.
    """
    n = gained + lost
    tail = sum(math.comb(n, i) for i in range(min(gained, lost) + 1))
    return min(1.0, float(2 * tail / 2**n))


def permutation_test(differences: Sequence[float], *, draws: int = 10_000, seed: int = 0) -> float:
    """Return the two-sided p-value of "the mean difference is 0": the signs of the (N,) differences are flipped.

    All sign patterns are tried for up to 14 non-zero differences; otherwise ``draws`` random ones, and the observed
    pattern counts as one of them, so that p is never 0.
    """
    x = np.asarray(differences, dtype=np.float64)
    x = x[x != 0]
    if len(x) == 0:
        return 1.0
    observed = abs(x.sum()) * (1 - 1e-12)
    if len(x) <= 14:
        patterns = (np.arange(2 ** len(x))[:, None] >> np.arange(len(x))) & 1
        return float(np.mean(np.abs((1 - 2 * patterns) @ x) >= observed))
    generator, hits = np.random.default_rng(seed), 0
    for start in range(0, draws, 1000):
        signs = 1 - 2 * generator.integers(0, 2, (min(1000, draws - start), len(x)), dtype=np.int8)
        hits += int(np.sum(np.abs(signs @ x) >= observed))
    return (hits + 1) / (draws + 1)


def _t95(degrees: int) -> float:
    """Return the 97.5 % point of Student's t: a table, then the Cornish-Fisher series."""
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    z, d = Z95, degrees
    return (
        z
        + (z**3 + z) / (4 * d)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * d**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * d**3)
    )


def majority_at_k(votes: Sequence[tuple[Hashable | None, bool]], k: int) -> float:
    """Return the mean, over all subsets of k samples, of "the most frequent answer is right"; ties share.

    An answer counts as right when one of its samples is; a sample without an answer (None) does not vote.

    Args:
        votes: (answer, correct) of each of the n samples.
        k: Size of the vote, 1 … n.

    Source: Wang et al. (2023), "Self-consistency"; the average over subsets is the unbiased estimate from n ≥ k.
    """
    n = len(votes)
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; expected 1 … n ({n})")
    right = {answer for answer, correct in votes if correct and answer is not None}
    counts = Counter(answer for answer, _ in votes if answer is not None)
    silent = n - sum(counts.values())
    if not right:
        return 0.0
    if k == n:
        best = max(counts.values())
        winners = [answer for answer, count in counts.items() if count == best]
        return sum(answer in right for answer in winners) / len(winners)
    wins = sum(_wins(counts, answer, silent, k) for answer in right)
    return min(1.0, wins / math.comb(n, k))  # shares of ties are rounded


def _wins(counts: Counter[Hashable], answer: Hashable, silent: int, k: int) -> float:
    """Return the number of subsets of size k in which ``answer`` wins; a tie of m counts 1 / m."""
    total = 0.0
    for top in range(1, min(counts[answer], k) + 1):
        # ways[size, ties]: choices of the other samples in which no answer has more than ``top`` votes
        ways = np.zeros((k - top + 1, (k - top) // top + 1))
        ways[0, 0] = 1.0
        ways = _choose(ways, silent, None)
        for other, count in counts.items():
            if other != answer:
                ways = _choose(ways, count, top)
        shares = 1.0 / (1 + np.arange(ways.shape[1]))
        total += math.comb(counts[answer], top) * float(ways[-1] @ shares)
    return total


def _choose(ways: np.ndarray, count: int, top: int | None) -> np.ndarray:
    """Extend ``ways`` by a choice of 0 … ``count`` samples; exactly ``top`` of them is one more tie."""
    result = np.zeros_like(ways)
    limit = count if top is None else min(count, top)
    for taken in range(min(limit, len(ways) - 1) + 1):
        moved = math.comb(count, taken) * ways[: len(ways) - taken]
        if taken == top:
            result[taken:, 1:] += moved[:, :-1]
        else:
            result[taken:] += moved
    return result


def elect(answers: Sequence[str | None], same: Callable[[str, str], bool]) -> tuple[str | None, int]:
    """Return the answer that most samples give, in the words of its first, and how many give it; a tie goes to the earlier.

    Args:
        answers: What each sample answered; None does not vote.
        same: Whether two answers are equal, such as ``1/2`` and ``0.5``.
    """
    names = _names(answers, same)
    counts = Counter(names[answer] for answer in answers if answer is not None)
    return max(counts.items(), key=lambda item: item[1], default=(None, 0))
