"""Laws of the estimators that hold for every input."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorist.evaluation.estimators import (
    cluster_mean,
    majority_at_k,
    mcnemar,
    paired_share_difference,
    pass_at_k,
    permutation_test,
    share_interval,
    wilson,
)

SHARES = st.lists(st.sampled_from([0.0, 0.125, 0.5, 0.875, 1.0]), min_size=1, max_size=40)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_its_value_and_is_symmetric(pair: tuple[int, int]) -> None:
    successes, n = pair
    found, mirrored = wilson(successes, n), wilson(n - successes, n)
    assert 0 <= found.low <= found.value <= found.high <= 1 and found.low < found.high
    assert found.low == pytest.approx(1 - mirrored.high) and found.high == pytest.approx(1 - mirrored.low)


@given(SHARES)
def test_share_interval_holds_its_value_and_has_width(values: list[float]) -> None:
    found = share_interval(values)
    assert 0 <= found.low <= found.value <= found.high <= 1 and found.low < found.high


@given(SHARES, st.integers(2, 5))
def test_copies_change_nothing(values: list[float], copies: int) -> None:
    problems = list(range(len(values)))
    once, more = cluster_mean(values, problems), cluster_mean(values * copies, problems * copies)
    assert (once.value, once.low, once.high) == pytest.approx((more.value, more.low, more.high), nan_ok=True)


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_pass_at_k_grows_with_k_and_with_correct(pair: tuple[int, int]) -> None:
    n, correct = pair
    values = [pass_at_k(n, correct, k) for k in range(1, n + 1)]
    assert values == sorted(values) and values[0] == pytest.approx(correct / n)
    if correct < n:
        assert all(pass_at_k(n, correct + 1, k) >= v for k, v in enumerate(values, start=1))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["1", "2", "3", None]), min_size=1, max_size=8), st.data())
def test_majority_against_brute_force(answers: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    votes = [(a, a in {"1", "2"}) for a in answers]
    total = 0.0
    subsets = list(itertools.combinations(votes, k))
    for subset in subsets:
        counts = Counter(a for a, _ in subset if a is not None)
        if counts:
            winners = [a for a, n in counts.items() if n == max(counts.values())]
            total += sum(a in {"1", "2"} for a in winners) / len(winners)
    assert majority_at_k(votes, k) == pytest.approx(total / len(subsets))


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_paired_difference_holds_its_value_and_is_antisymmetric(gained: int, lost: int, same: int) -> None:
    n = gained + lost + same + 1
    found, reverse = paired_share_difference(gained, lost, n), paired_share_difference(lost, gained, n)
    assert found.low <= found.value <= found.high and found.low < found.high
    assert (found.low, found.high) == pytest.approx((-reverse.high, -reverse.low))
    assert 0 < mcnemar(gained, lost) <= 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=9))
def test_permutation_test_knows_no_order_sign_or_scale(differences: list[float]) -> None:
    p = permutation_test(differences)
    assert 0 < p <= 1
    assert permutation_test([-d for d in reversed(differences)]) == pytest.approx(p)
    assert permutation_test([d * 4 for d in differences]) == pytest.approx(p)
