"""The numbers of the evaluation: by hand, against tables, against brute force, and by simulated coverage."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from algorist.errors import DataError
from algorist.evaluation.console import breakdown
from algorist.evaluation.estimators import (
    _t95,
    cluster_mean,
    cluster_means,
    majority_at_k,
    mcnemar,
    mean_interval,
    paired_difference,
    paired_rate_difference,
    paired_share_difference,
    pass_at_k,
    permutation_test,
    share_interval,
    summarise,
    wilson,
)
from algorist.prompts import get_format
from algorist_grader import grade_completion


def test_wilson_against_published_values() -> None:
    # Newcombe (1998), table I, method 3: 81/263, 15/148, 0/20, 1/29
    for successes, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        found = wilson(successes, n)
        assert (round(found.low, 4), round(found.high, 4)) == (low, high)
    assert wilson(20, 20).high == 1.0 and math.isnan(wilson(0, 0).value)


def test_student_t_points_against_the_table() -> None:
    for degrees, point in (
        (1, 12.706),
        (4, 2.776),
        (12, 2.179),
        (13, 2.1604),
        (20, 2.0860),
        (60, 2.0003),
        (249, 1.9695),
    ):
        assert _t95(degrees) == pytest.approx(point, abs=6e-4)


def test_mean_interval_by_hand() -> None:
    # values 1, 2, 3: mean 2, s = 1, t(2) = 4.3027, half = 4.3027 / sqrt(3)
    found = mean_interval([1, 2, 3])
    assert (found.value, found.n) == (2.0, 3)
    assert found.high - 2 == pytest.approx(4.3027 / math.sqrt(3))
    assert math.isnan(mean_interval([5.0]).low) and math.isnan(mean_interval([]).value)


def test_share_interval_is_wilson_for_right_or_wrong() -> None:
    values = [1.0] * 60 + [0.0] * 140
    found, by_formula = share_interval(values), wilson(60, 200)
    # the t point instead of z and s² with N − 1: slightly wider, never narrower than z's beyond rounding
    assert found.low == pytest.approx(by_formula.low, abs=2e-3) and found.high == pytest.approx(
        by_formula.high, abs=2e-3
    )
    assert share_interval([0.0] * 50).high > 0.05 and share_interval([1.0] * 50).low < 0.95


def test_clusters_are_needed() -> None:
    with pytest.raises(DataError, match="no cluster labels"):
        cluster_mean([1.0, 0.0], None)
    with pytest.raises(DataError, match="sample 1 has no cluster label"):
        cluster_mean([1.0, 0.0], ["a", None])
    with pytest.raises(DataError, match="2 values but 1 cluster labels"):
        cluster_mean([1.0, 0.0], ["a"])
    with pytest.raises(DataError, match="no problem_id"):
        summarise([sample("", True, greedy=False)])


def test_copies_of_a_sample_do_not_narrow_the_interval() -> None:
    values, problems = [1.0, 0.0, 1.0, 0.0, 1.0], list("abcde")
    once, ten = cluster_mean(values, problems), cluster_mean(values * 10, problems * 10)
    assert (once.low, once.high, once.n) == pytest.approx((ten.low, ten.high, ten.n))
    assert cluster_means([1.0, 0.0, 1.0], ["b", "b", "a"]) == {"b": 0.5, "a": 1.0}


def test_bootstrap_agrees_with_t() -> None:
    values = np.random.default_rng(0).normal(3.0, 1.0, 300)
    clusters = [i // 3 for i in range(300)]
    t, means = cluster_mean(values, clusters), np.array([*cluster_means(values, clusters).values()])
    drawn = np.random.default_rng(0).choice(means, (2000, len(means))).mean(1)
    assert (t.low, t.high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.02)


def coverage(draw: Any, truth: float, repeats: int, seed: int) -> float:
    generator = np.random.default_rng(seed)
    hits = 0
    for _ in range(repeats):
        found = draw(generator)
        hits += found.low <= truth <= found.high
    return hits / repeats


@pytest.mark.parametrize(("p", "n"), [(0.08, 250), (0.35, 100), (0.62, 250), (0.9, 150)])
def test_coverage_of_greedy_accuracy(p: float, n: int) -> None:
    found = coverage(lambda g: share_interval((g.random(n) < p).astype(float)), p, 4000, 1)
    assert 0.93 <= found <= 0.97, found


@pytest.mark.parametrize(
    ("a", "b", "n", "samples"), [(1, 1, 60, 8), (0.3, 2.0, 100, 8), (4, 2, 40, 4), (0.5, 0.5, 250, 16)]
)
def test_coverage_of_the_clustered_mean(a: float, b: float, n: int, samples: int) -> None:
    """Problems differ in difficulty (beta-distributed); samples of one problem hang together."""

    def draw(g: np.random.Generator) -> Any:
        return share_interval(g.binomial(samples, g.beta(a, b, n)) / samples)

    found = coverage(draw, a / (a + b), 4000, 2)
    assert 0.93 <= found <= 0.97, found


def test_samples_taken_as_independent_would_cover_too_little() -> None:
    """The error that clustering prevents: the naive interval misses far more often than 5 %."""

    def naive(g: np.random.Generator) -> Any:
        return wilson(int(g.binomial(8, g.beta(0.5, 0.5, 100)).sum()), 800)

    assert coverage(naive, 0.5, 1000, 3) < 0.7


def test_coverage_of_pass_at_4() -> None:
    # p ~ Uniform: E[1 − (1 − p)^4] = 0.8
    def draw(g: np.random.Generator) -> Any:
        return share_interval([pass_at_k(8, int(c), 4) for c in g.binomial(8, g.random(120))])

    assert 0.93 <= coverage(draw, 0.8, 2000, 4) <= 0.97


@pytest.mark.parametrize(("gain", "loss", "n"), [(0.10, 0.04, 250), (0.25, 0.20, 100), (0.02, 0.02, 500)])
def test_coverage_of_the_paired_share_difference(gain: float, loss: float, n: int) -> None:
    def draw(g: np.random.Generator) -> Any:
        gained, lost, _ = g.multinomial(n, [gain, loss, 1 - gain - loss])
        return paired_share_difference(int(gained), int(lost), n)

    assert 0.93 <= coverage(draw, gain - loss, 4000, 5) <= 0.975


def test_a_rate_that_no_problem_changes_is_not_known_exactly() -> None:
    shares = [0.0, 0.25, 1.0, 0.5] * 4
    still = paired_rate_difference(shares, shares)
    assert still.value == 0 and still == paired_share_difference(0, 0, 16)
    assert still.high > 1 / 16 and still.low == -still.high
    moved = [0.25, *shares[1:]]
    assert paired_rate_difference(shares, moved) == paired_difference(shares, moved)


def test_no_difference_of_shares_is_beyond_a_whole_one() -> None:
    gained = paired_rate_difference([0.0] * 10, [1.0] * 9 + [0.875])
    assert 0.95 < gained.low < gained.value < gained.high == 1.0
    lost = paired_rate_difference([1.0] * 9 + [0.875], [0.0] * 10)
    assert (lost.low, lost.high) == (-1.0, -gained.low)
    assert math.isnan(paired_rate_difference([0.0], [1.0]).low)


@pytest.mark.parametrize(("n", "samples"), [(5, 2), (10, 2), (20, 2), (8, 4)])
def test_coverage_where_all_problems_may_change_alike(n: int, samples: int) -> None:
    assert paired_rate_difference([0.0] * 5, [1.0] * 5).low == pytest.approx(
        paired_share_difference(5, 0, 5).low
    )

    def draw(g: np.random.Generator) -> Any:
        shares = (list(g.binomial(samples, p, n) / samples) for p in (0.02, 0.98))
        return paired_rate_difference(*shares)

    assert coverage(draw, 0.96, 4000, 5) >= 0.93


def test_coverage_of_the_paired_difference_of_means() -> None:
    def draw(g: np.random.Generator) -> Any:
        base = g.normal(0, 3, 80)
        return paired_difference(list(base + g.normal(0, 1, 80)), list(base + 0.3 + g.normal(0, 1, 80)))

    assert 0.93 <= coverage(draw, 0.3, 3000, 6) <= 0.97


def test_coverage_of_a_mean_reward_and_of_a_length() -> None:
    """Rewards stand on few values, lengths are skewed; 250 problems, one value each."""

    def reward(g: np.random.Generator) -> Any:
        return cluster_mean(list(g.choice([-1.0, 0.2, 1.2], size=250, p=[0.2, 0.5, 0.3])), list(range(250)))

    def length(g: np.random.Generator) -> Any:
        return cluster_mean(list(g.gamma(2.0, 40.0, 250)), list(range(250)))

    assert 0.93 <= coverage(reward, -0.2 + 0.1 + 0.36, 2000, 9) <= 0.97
    assert 0.93 <= coverage(length, 80.0, 2000, 10) <= 0.97


@pytest.mark.parametrize("high", [1.0, 0.5])
def test_the_interval_of_a_reward_of_two_values_stays_between_them(high: float) -> None:
    rows = [
        {"problem_id": n, "sample": 0, "greedy": True, "correct": n > 2, "well_formed": n > 2, "truncated": False,
         "completion_tokens": 5, "extracted": "1", "rewards": {"well_formed": high * (n > 2)}}
        for n in range(50)
    ]  # fmt: skip
    found = summarise(rows)["rewards/well_formed"]
    assert found.value == pytest.approx(0.94 * high) and 0 < found.low < found.value < found.high < high
    alike = [row | {"rewards": {"well_formed": 0.0}} for row in rows[:3]]
    none = summarise(alike)["rewards/well_formed"]
    assert none.value == none.low == 0 and none.high > 0.4, "three zeros do not show that all are"


@pytest.mark.slow
def test_coverage_of_all_that_an_evaluation_says() -> None:
    """From rows to intervals: problems of uniform difficulty, one greedy and four sampled answers each.

    Right-or-wrong answers cover 94.3 to 97.1 % exactly, jumping with the number of problems; 60 lies in the middle.
    """
    truth = {"greedy_accuracy": 0.5, "pass@1": 0.5, "pass@4": 0.8, "reward": 0.6}
    generator, repeats, hits = np.random.default_rng(11), 700, dict.fromkeys(truth, 0)
    for _ in range(repeats):
        rows = []
        for problem, chance in enumerate(generator.random(60)):
            for index, right in enumerate(generator.random(5) < chance):
                rewards = {"reward": float(right) + 0.1, "rewards": {}}
                rows.append(sample(str(problem), bool(right), greedy=index == 0, **rewards))
        found = summarise(rows, ks=(1, 4))
        for name, value in truth.items():
            hits[name] += found[name].low <= value <= found[name].high
    assert all(0.93 <= hit / repeats <= 0.97 for hit in hits.values()), hits


def test_equal_models_are_called_different_in_at_most_five_percent() -> None:
    """McNemar's exact test and the permutation test keep their level where nothing changes."""
    generator, repeats, flips, means = np.random.default_rng(12), 1500, 0, 0
    for _ in range(repeats):
        gained, lost, _ = generator.multinomial(250, [0.08, 0.08, 0.84])
        flips += mcnemar(int(gained), int(lost)) < 0.05
        rates = generator.binomial(8, generator.beta(1, 1, 12)[:, None].repeat(2, 1)) / 8
        means += permutation_test(rates[:, 1] - rates[:, 0]) < 0.05
    assert 0.005 < flips / repeats <= 0.06 and 0.02 < means / repeats <= 0.065, (flips, means)


@pytest.mark.parametrize(
    ("n", "correct", "k"), [(6, 2, 3), (8, 0, 4), (8, 8, 4), (7, 5, 2), (7, 1, 7), (5, 3, 1)]
)
def test_pass_at_k_against_brute_force(n: int, correct: int, k: int) -> None:
    samples = [1] * correct + [0] * (n - correct)
    tried = [any(chosen) for chosen in itertools.combinations(samples, k)]
    assert pass_at_k(n, correct, k) == pytest.approx(sum(tried) / len(tried))


def test_pass_at_k_is_unbiased() -> None:
    """The mean of the estimate over many draws is 1 − (1 − p)^k; the plug-in estimate's is not."""
    generator, p, n, k = np.random.default_rng(7), 0.15, 8, 4
    counts = generator.binomial(n, p, 40_000)
    truth = 1 - (1 - p) ** k
    assert np.mean([pass_at_k(n, int(c), k) for c in counts]) == pytest.approx(truth, abs=0.006)
    assert abs(np.mean(1 - (1 - counts / n) ** k) - truth) > 0.02


def test_pass_at_k_refuses_nonsense() -> None:
    for n, correct, k in ((4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)):
        with pytest.raises(ValueError, match="expected"):
            pass_at_k(n, correct, k)


def test_spellings_of_an_answer_vote_together() -> None:
    right, wrong = ("\\$12", "12 dollars", "12.00"), ("15", "15", "15.0", "16")
    rows = [
        {"problem_id": "p", "greedy": False, "extracted": a, "correct": a in right}
        for a in (*right, *wrong[:2], None)
    ]
    assert summarise(rows, ks=(1,))["maj@6"].value == 1.0
    rows = [
        {"problem_id": "p", "greedy": False, "extracted": a, "correct": a in right}
        for a in (*right[:2], *wrong)
    ]
    assert summarise(rows, ks=(1,))["maj@6"].value == 0.0


def test_an_answer_that_one_completion_contradicts_still_wins_the_vote() -> None:
    """Of a completion with two answers the last one is compared with the others', and it is wrong: the order of samples is no matter."""
    rows = [
        {"problem_id": "p", "greedy": False, "extracted": "7", "correct": right}
        for right in (True, True, False)
    ]
    for order in (rows, rows[::-1]):
        metrics = summarise(order, ks=(1, 2))
        assert metrics["maj@2"].value == metrics["maj@3"].value == 1.0


def test_majority_by_hand() -> None:
    # 7 7 8: 7 is right; every pair but the one that is 7 7 ties
    votes = [("7", True), ("7", True), ("8", False)]
    assert majority_at_k(votes, 3) == 1.0
    assert majority_at_k(votes, 2) == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert majority_at_k(votes, 1) == pytest.approx(2 / 3)
    assert majority_at_k([(None, False)] * 4, 2) == 0.0
    assert majority_at_k([(None, False), ("3", True)], 2) == 1.0


def test_mcnemar_by_hand() -> None:
    assert mcnemar(0, 0) == 1.0 and mcnemar(5, 5) == 1.0
    # 1 of 10: 2 · (1 + 10) / 1024
    assert mcnemar(9, 1) == pytest.approx(22 / 1024) and mcnemar(1, 9) == mcnemar(9, 1)
    assert mcnemar(2000, 1500) < 1e-10


@pytest.mark.parametrize(("gained", "lost"), [(9, 1), (7, 7), (0, 5), (8, 3)])
def test_mcnemar_is_the_exact_permutation_test(gained: int, lost: int) -> None:
    assert permutation_test([1.0] * gained + [-1.0] * lost + [0.0] * 50) == pytest.approx(
        mcnemar(gained, lost)
    )


def test_random_permutations_agree_with_all_of_them_and_with_mcnemar() -> None:
    assert permutation_test([1.0] * 40 + [-1.0] * 24, draws=20_000) == pytest.approx(
        mcnemar(40, 24), abs=0.01
    )
    assert permutation_test([0.0] * 9) == 1.0
    assert permutation_test([1.0] * 30, draws=500) == pytest.approx(1 / 501)


def test_permutation_test_agrees_with_the_t_interval() -> None:
    """The interval leaves 0 out about where the permutation test says p < 0.05."""
    generator, agree = np.random.default_rng(8), 0
    for _ in range(200):
        differences = generator.normal(0.25, 1, 60)
        interval = paired_difference([0.0] * 60, list(differences))
        agree += (permutation_test(differences, draws=1000) < 0.05) == (interval.low > 0 or interval.high < 0)
    assert agree >= 190


def sample(problem: str, correct: bool, *, greedy: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "problem_id": problem,
        "greedy": greedy,
        "correct": correct,
        "well_formed": True,
        "truncated": False,
        "completion_tokens": 10,
        "extracted": "1" if correct else "2",
    } | more


def test_summarise_by_hand() -> None:
    rows = [
        sample("a", True, completion_tokens=10),
        sample("b", False, completion_tokens=30, well_formed=False),
    ]
    rows += [sample("a", c, greedy=False) for c in (True, True, False, False)]
    rows += [sample("b", c, greedy=False) for c in (False, False, False, True)]
    found = summarise(rows, ks=(1, 2, 4, 8))
    assert list(found) == [
        "greedy_accuracy", "format", "truncated", "mean_tokens",
        "pass@1", "pass@2", "pass@4", "maj@2", "maj@4",
    ]  # fmt: skip
    assert {k: v.value for k, v in found.items()} == pytest.approx(
        {
            "greedy_accuracy": 0.5,
            "format": 0.5,
            "truncated": 0.0,
            "mean_tokens": 20.0,
            "pass@1": (0.5 + 0.25) / 2,
            "pass@2": ((1 - 1 / 6) + 0.5) / 2,
            "pass@4": 1.0,
            "maj@2": (0.5 + 0.25) / 2,
            "maj@4": (0.5 + 0.0) / 2,
        }
    )
    assert all(v.n == 2 and v.low <= v.value <= v.high for v in found.values())


def test_lenient_accuracy_stands_beside_the_strict_one() -> None:
    rows = [sample(name, name == "a") | {"lenient": name != "c"} for name in "abc"]
    found = summarise(rows)
    assert list(found)[:2] == ["greedy_accuracy", "lenient_accuracy"]
    assert [found[k].value for k in list(found)[:2]] == pytest.approx([1 / 3, 2 / 3])


def test_summarise_of_nothing_tells_nothing() -> None:
    found = summarise([])
    assert math.isnan(found["greedy_accuracy"].value) and found["greedy_accuracy"].n == 0


def test_breakdown_by_level_and_errors() -> None:
    rows = [
        sample("a", True, level="Level 2"),
        sample("b", False, level="Level 10"),
        sample("c", True, level=""),
        sample("d", True, level="Level 12, m²"),
    ]
    found = breakdown(rows, "level")
    assert list(found) == ["Level 2", "Level 10", "Level 12, m²", "(none)"]
    assert found["Level 10"]["greedy_accuracy"].value == 0.0
    with pytest.raises(DataError, match=r"Did you mean 'subject'\?"):
        breakdown(rows, "subjekt")
    with pytest.raises(DataError, match="no column 'dataset'"):
        breakdown(rows, "dataset")


def test_the_four_outputs_of_the_original_test() -> None:
    form = get_format("working_solution")
    shown = "15 times 23.\n<end_working_out>\n<SOLUTION>\n%s\n</SOLUTION>"
    outputs = [(shown % "345", "345"), (shown % "344", "345"), ("345", "345"), (shown % "15", "15")]
    rows, rewards = [], (10.5, -2.5, -6.5, 12.0)
    for number, (text, gold) in enumerate(outputs):
        parsed = form.parse(text)
        told = grade_completion(text, gold, parsed=parsed, matcher="numeric")
        same = {"greedy": True, "truncated": False, "completion_tokens": 10, "problem_id": str(number)}
        length = len(parsed.reasoning or "")
        same |= {"has_reasoning": length > 0, "reasoning_characters": length}
        same |= {"reward": rewards[number], "rewards": {"all": rewards[number]}}
        rows.append({**same, "correct": told.correct, "well_formed": parsed.well_formed})
    found = summarise(rows)
    assert (found["format"].value, found["greedy_accuracy"].value) == (0.75, 0.5)
    assert (found["reasoning_present"].value, found["reward"].value) == (0.75, 3.375)
    assert found["mean_reasoning_characters"].value == 3 * len("15 times 23.") / 4


def test_a_majority_of_many_right_answers_is_no_more_than_all() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        votes = [(str(number), True) for number in draw.integers(0, 26, 64)]
        assert 1 - 1e-9 < majority_at_k(votes, 16) <= 1


def test_a_majority_of_wrong_answers_is_wrong_though_a_right_one_has_their_value() -> None:
    """Make 14 from 2, 3 and 4: 7 · 2 is not allowed."""
    answers = ["7 * 2"] * 6 + ["2 + 3 * 4", "14"]
    rows = [
        {"problem_id": "p", "greedy": False, "correct": answer == "2 + 3 * 4", "extracted": answer}
        for answer in answers
    ]
    assert summarise(rows, ks=(8,))["maj@8"].value == 0
