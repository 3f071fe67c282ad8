"""maj@k, exactly: the chance that a vote among k of the n samples elects a right answer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np


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
    return sum(_wins(counts, answer, silent, k) for answer in right) / math.comb(n, k)


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
    counts: dict[str, int] = {}
    for answer in answers:
        if answer is not None:
            name = next((known for known in counts if known == answer or same(answer, known)), answer)
            counts[name] = counts.get(name, 0) + 1
    return max(counts.items(), key=lambda item: item[1], default=(None, 0))
