"""Laws of the grader: reflexive, symmetric, blind to spelling, never true for different rationals."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from algorist_grader import extract, grade, grade_completion, numeric_value
from pairs import pairs

GOLDS = sorted({p[2] for p in pairs()})
ANSWERS = sorted({p[3] for p in pairs()})
gold = st.sampled_from(GOLDS)
answer = st.sampled_from(ANSWERS)
whole = st.integers(min_value=-(10**25), max_value=10**25)
rational = st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=10**5)


def written(value: Fraction, style: int) -> str:
    """One of the ways to write a rational."""
    top, bottom = value.numerator, value.denominator
    sign = "-" if top < 0 else ""
    ways = [
        f"{top}/{bottom}",
        f"{sign}\\frac{{{abs(top)}}}{{{bottom}}}",
        f"\\dfrac{{{top}}}{{{bottom}}}",
        f"$\\frac{{{top * 3}}}{{{bottom * 3}}}$",
        f"\\left({top}\\right)/{bottom}",
        f"{sign}{abs(top) // bottom} {abs(top) % bottom}/{bottom}"
        if abs(top) > bottom > 1
        else f"{top}/{bottom}",
    ]
    return ways[style % len(ways)]


@given(gold)
def test_reflexive(text: str) -> None:
    assert grade(text, text).correct


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(gold, answer)
def test_symmetric_and_deterministic(one: str, other: str) -> None:
    there, back = grade(one, other), grade(other, one)
    assume("unparseable_gold" not in (there.reason, back.reason))
    assert there.correct == back.correct
    again = grade(one, other)
    assert (again.correct, again.reason) == (there.correct, there.reason)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(gold, st.integers(0, 9))
def test_unchanged_by_latex_spelling(text: str, way: int) -> None:
    bare = text.replace("\\left", "").replace("\\right", "")
    ways = [
        f"${text}$", f" {text} ", f"{text}.", f"\\({text}\\)", f"\\boxed{{{text}}}", f"\\[ {text} \\]",
        bare.replace("(", "\\left(").replace(")", "\\right)"), bare.replace("+", "\\,+\\,").replace("=", "\\;=\\;"),
        bare.replace("\\frac", "\\dfrac"), f"\\displaystyle {text}",
    ]  # fmt: skip
    changed = ways[way]
    assume("$" not in text and not text.endswith("..") and "..." not in text)
    assume(not (way in (6, 7) and ("\\text" in text or "e+" in text.lower())))
    assert grade(changed, text).correct, changed


@pytest.mark.slow
@given(rational, st.integers(0, 5), st.integers(0, 5))
def test_the_same_rational_in_two_spellings(value: Fraction, one: int, other: int) -> None:
    a, b = written(value, one), written(value, other)
    assert numeric_value(a) == value or one == 4
    assert grade(a, b).correct, (a, b)


@pytest.mark.slow
@given(rational, rational, st.integers(0, 5), st.integers(0, 5))
def test_different_rationals_are_never_equal(a: Fraction, b: Fraction, one: int, other: int) -> None:
    assume(a != b and a != b * 100 and b != a * 100)
    assert not grade(written(a, one), written(b, other)).correct


@given(whole, st.sampled_from([1, -1, 10, 10**12, -(10**6)]))
def test_big_integers(value: int, step: int) -> None:
    assert grade(str(value), str(value)).correct and grade(f"{value:,}", str(value)).correct
    assert not grade(str(value + step), str(value)).correct
    assert not grade(f"{value + step}.0", f"\\frac{{{value}}}{{1}}").correct


@pytest.mark.slow
@given(st.fractions(min_value=1, max_value=10**9, max_denominator=10**6))
def test_one_part_in_a_million_million(value: Fraction) -> None:
    near = value * (1 + Fraction(1, 10**12))
    assert not grade(written(near, 0), written(value, 1)).correct
    assert not grade(f"\\sqrt{{2}}+{written(near, 0)}", f"\\sqrt{{2}}+{written(value, 0)}").correct


@given(rational, st.floats(1e-9, 1e-3))
def test_a_tolerance_only_where_it_is_declared(value: Fraction, tolerance: float) -> None:
    assume(value != 0)
    near = value * (1 + Fraction(tolerance) / 2)
    far = value * (1 + Fraction(tolerance) * 2)
    assert grade(written(near, 0), written(value, 0), tolerance=tolerance).correct
    assert not grade(written(far, 0), written(value, 0), tolerance=tolerance).correct
    assert not grade(written(near, 0), written(value, 0)).correct


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.text(max_size=80), gold)
def test_any_text_is_a_verdict(text: str, truth: str) -> None:
    grade(text, truth)
    grade_completion(text, truth)
    found = extract(text)
    assert found.answer is None or found.answer.strip()


@given(gold)
def test_two_answers_are_not_one(text: str) -> None:
    assume(text not in ("7", "-7") and "\n" not in text)
    for completion in (
        f"<answer>{text}</answer><answer>123456</answer>",
        f"\\boxed{{{text}}} no, \\boxed{{123456}}",
        f"<think>\\boxed{{{text}}}",
        f"<think>the answer is {text}</think> I do not know",
    ):
        assert not grade_completion(completion, text).correct
