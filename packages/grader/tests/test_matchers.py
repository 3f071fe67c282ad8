"""The matchers by name, verdicts and reasons, several golds, unreadable golds, tolerance."""

from __future__ import annotations

from typing import Any

import pytest

from algorist_grader import MATCHERS, grade, grade_many, is_text_only, numeric_value, why_unreadable
from algorist_grader.errors import ConfigError
from algorist_grader.matchers import Matcher


@pytest.mark.parametrize(
    ("answer", "gold", "matcher", "correct", "reason"),
    [
        ("12", "12", "symbolic", True, "equal_string"),
        ("12.0", "12", "symbolic", True, "equal_number"),
        ("\\frac{1}{\\sqrt2}", "\\frac{\\sqrt2}{2}", "symbolic", True, "equal_symbolic"),
        ("\\sqrt{5+2\\sqrt6}", "\\sqrt2+\\sqrt3", "symbolic", True, "equal_symbolic"),
        ("\\sqrt{5+2\\sqrt6}", "\\sqrt2+\\sqrt3", "symbolic_fast", False, "unparseable_answer"),
        ("13", "12", "symbolic", False, "different"),
        (None, "12", "symbolic", False, "no_answer"),
        ("  ", "12", "symbolic", False, "no_answer"),
        ("12 or 13", "12", "symbolic", False, "ambiguous"),
        ("\\frac{1", "12", "symbolic", False, "unparseable_answer"),
        ("12\x00", "12", "symbolic", False, "unparseable_answer"),
        ("12", "", "symbolic", False, "unparseable_gold"),
        ("12", "}{", "symbolic", False, "unparseable_gold"),
        ("...", "...", "symbolic", False, "unparseable_gold"),
        ("x" * 5000, "12", "symbolic", False, "unparseable_answer"),
        ("5.0", "5", "exact", False, "different"),
        (" 5 ", "5", "exact", True, "equal_string"),
        ("1,000", "1000", "exact", False, "different"),
        ("1 000", "1000", "exact_no_space", True, "equal_string"),
        ("5.0", "5", "exact_no_space", False, "different"),
        ("5.0", "5", "numeric", True, "equal_number"),
        ("x+1", "x + 1", "numeric", True, "equal_string"),
        ("1+x", "x+1", "numeric", False, "different"),
        ("five", "5", "numeric", False, "unparseable_answer"),
        ("105", "100", "ratio_bands", True, "equal_number"),
        ("89", "100", "ratio_bands", False, "different"),
        ("x", "100", "ratio_bands", False, "unparseable_answer"),
        ("\\frac12", "0.5", "latex_verify", True, "equal_symbolic"),
        ("3", "4", "latex_verify", False, "different"),
    ],
)
def test_verdicts(answer: str | None, gold: str, matcher: str, correct: bool, reason: str) -> None:
    found = grade(answer, gold, matcher=matcher)
    assert (found.correct, found.reason, found.extracted, found.gold) == (correct, reason, answer, gold)


@pytest.mark.parametrize(
    "gold, right, wrong",
    [
        ("12,5", ["12,5", "12, 5", "12 and 5", "\\{12,5\\}", "x=12, x=5"], ["5,12", "5, 12", "\\{5,12\\}", "12.5", "x=5,12", "x_1=5, x_2=12"]),
        ("x=12,5", ["12,5"], ["5,12"]),
        ("1/3,1/2", ["1/2, 1/3", "1/2,1/3", "\\frac{1}{2},\\frac{1}{3}"], ["1/3,1/4"]),
        ("12,5 %", [], ["5 %,12"]),
        ("1.234,5", ["1.234, 5"], ["5,1.234"]),
        ("12, 5", ["5,12", "5, 12"], []),  # a list by its blank
        ("12,5,7", ["7,5,12"], []),
        ("-5,12", [], ["12,-5"]),
        ("12500", ["12,500"], []),
    ],
)  # fmt: skip
def test_what_may_be_a_decimal_comma_is_right_in_its_own_order_only(
    gold: str, right: list[str], wrong: list[str]
) -> None:
    assert [answer for answer in right if not grade(answer, gold).correct] == []
    assert [answer for answer in wrong if grade(answer, gold).correct] == []


@pytest.mark.parametrize(
    ("answer", "gold", "correct"),
    [
        ("\\dfrac{1}{2}", "\\frac{1}{2}", True),
        ("0.5", "\\frac{1}{2}", True),
        ("\\frac{2}{4}", "\\frac{1}{2}", False),  # unreduced
        ("2/4", "1/2", False),
        ("x=5", "5", True),
        ("5 \\text{ cm}", "5", True),
        ("50\\%", "50", True),
        ("5.0", "5", True),
        ("5.5", "5", False),
        ("x^2-1", "5", False),  # an integer gold needs an integer
        ("(1,2)", "(1,2)", True),
        ("( 1 , 2 )", "(1,2)", True),
        ("[1,2)", "(1,2)", False),
        ("(1,2,3)", "(1,2)", False),
        ("(1,\\frac{4}{2})", "(1,2)", False),
        ("\\sqrt{8}", "2\\sqrt{2}", True),
        ("2x+x", "3x", True),
        ("abcd", "dcba", False),  # more than two letters are not evaluated
        ("9^{9^{9^9}}", "x", False),
        ("1,234", "1234", True),
        ("", "5", False),
        ("\\text{Tuesday}", "Tuesday", True),
        ("tuesday", "Tuesday", True),
    ],
)
def test_hendrycks_sympy(answer: str, gold: str, correct: bool) -> None:
    assert grade(answer, gold, matcher="hendrycks_sympy").correct is correct


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\infty-\infty", "0"),
        (r"5+\infty-\infty", "5"),
        (r"\infty/\infty", "1"),
        (r"1^\infty", "1"),
        (r"\infty^0", "1"),
        (r"0\cdot\infty", "0"),
        (r"x\infty/\infty", "x"),
    ],
)
def test_infinity_is_not_a_letter(answer: str, gold: str) -> None:
    assert not grade(answer, gold).correct
    assert grade(r"\pm\infty", r"\pm \infty").correct and grade("x<3", r"(-\infty,3)").correct


@pytest.mark.parametrize("reply", [True, None, 5])
def test_a_matcher_that_returns_no_pair_pays_nothing(reply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MATCHERS, "_entries", dict(MATCHERS._entries))
    MATCHERS.register("own")(Matcher("own", "", lambda answer, gold, limits: reply))
    assert grade("1", "2", matcher="own").reason == "crashed"


def test_unknown_matcher() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'symbolic'"):
        grade("1", "1", matcher="symbolc")


def test_every_name_of_the_specification_is_there() -> None:
    names = "exact exact_no_space numeric ratio_bands symbolic latex_verify hendrycks_sympy symbolic_fast"
    assert set(names.split()) <= set(MATCHERS.names())
    assert all(MATCHERS.get(name).claim for name in MATCHERS)


def test_several_golds() -> None:
    assert grade("1/2", ["3", "0.5"]).gold == "0.5"
    assert grade("4", ["3", "0.5"]).reason == "different"
    assert grade("4", ["", "3"]).reason == "different"
    assert grade("4", []).reason == "unparseable_gold"
    assert grade("4", [" "]).reason == "unparseable_gold"


def test_why_a_gold_is_unreadable() -> None:
    assert why_unreadable("12") == why_unreadable("\\text{Tuesday}") == why_unreadable("\\int_0^1 x dx") == ""
    assert "empty" in why_unreadable(" ")
    assert "longer" in why_unreadable("1" * 3000)
    assert "braces" in why_unreadable("\\frac{1}{2")
    assert "no letter" in why_unreadable("??")
    assert "control" in why_unreadable("1\x002")
    assert is_text_only("\\int_0^1 x dx") and not is_text_only("12") and not is_text_only("\\frac{x}{2}")


def test_a_text_only_gold_is_its_own_answer_and_nothing_else() -> None:
    gold = "\\int_0^1 f(x)\\,dx"
    assert grade("$\\int_0^1 f(x)dx$", gold).correct
    assert grade("1", gold).reason == "different"
    assert grade("\\int_0^1 f(y)dy", gold).correct is False


def test_many_keeps_the_order_and_grades_equal_pairs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from algorist_grader import grade as front_name
    from algorist_grader import grade_many as many

    module = __import__("sys").modules[many.__module__]
    asked: list[tuple[str | None, str]] = []

    def counting(answer: str | None, gold: str, **rest: object):  # type: ignore[no-untyped-def]
        asked.append((answer, gold))
        return front_name(answer, gold)

    monkeypatch.setattr(module, "grade", counting)
    found = grade_many([("1", "1"), ("2", "1"), ("1", "1"), (None, "1")], workers=1)
    assert [f.correct for f in found] == [True, False, True, False]
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,234", 1234), ("-3/6", "-1/2"), ("3 1/2", "7/2"), ("50%", 50), ("$5", 5), ("1e3", 1000), ("0.(3)", "1/3"), ("٣", 3), ("½", "1/2")],
)  # fmt: skip
def test_numeric_value(text: str, value: int | str) -> None:
    from fractions import Fraction

    assert numeric_value(text) == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1/0",
        "1,23",
        "inf",
        "nan",
        "1e99999",
        "1_000",
        "0x1f",
        "1 2",
        "--1",
        "5 apples",
        "\\frac{1}{0}",
    ],
)
def test_no_numeric_value(text: str) -> None:
    assert numeric_value(text) is None


@pytest.mark.parametrize(("answer", "gold"), [("150", "15"), ("1.5", "15"), ("15.0004", "15"), ("15", "1.5")])
def test_contained_or_nearly_equal_answers_are_wrong(answer: str, gold: str) -> None:
    assert not grade(answer, gold).correct


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("25 degrees Celsius", "25", True),
        ("25 degrees Celsius", "25°C", True),
        ("25^\\circ\\mathrm{C}", "25 degrees Celsius", True),
        ("-4 degrees fahrenheit", "-4", True),
        ("25 degrees Celsius", "26", False),
        ("25 Celsius", "25", True),
        ("77 fahrenheit", "25 Celsius", False),
        ("77 degrees Fahrenheit", "77°C", False),
        ("\\text{(B) dog}", "B", True),
        ("\\text{(C) dog}", "B", False),
        ("\\text{(B) 12}", "12", True),
        ("\\text{(B) 12}", "13", False),
        ("b)", "B", True),
        ("c)", "B", False),
    ],
)
def test_scales_of_temperature_and_labels_within_text(answer: str, gold: str, right: bool) -> None:
    assert grade(answer, gold).correct is right
