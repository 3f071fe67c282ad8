"""Any length, any token, any number: a verdict and never an exception, in a bounded amount of work and memory."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from algorist_grader import MATCHERS, forget_verdicts, grade, grade_completion, grade_many
from algorist_grader.grade import _CACHE_BYTES, _verdicts
from algorist_grader.matchers import Matcher

ROOT = Path(__file__).resolve().parents[3]

LONG = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))  # the kernel ends the process: no clock is read
from algorist_grader import MATCHERS, boxed, extract, grade, grade_completion, hash_answer, last_boxed
for token in sys.argv[1:]:
    body = token * (300_000 // len(token))
    for text in (body, "\\\\boxed{5}" + body, "</think> <answer>" + body + "</answer>"):
        for name in MATCHERS:
            grade(text, "5", matcher=name), grade("5", text, matcher=name)
        for function in (boxed, last_boxed, hash_answer, extract):
            function(text)
        grade_completion(text, "x^2+1")
print("done")
"""


@pytest.mark.slow
def test_a_long_text_of_one_token_costs_no_more_than_reading_it() -> None:
    """300,000 characters: quadratic readers need many minutes for these; the linear ones need a second or two in all."""
    tokens = [
        "\\boxed{",
        "<answer>",
        "<SOLUTION>",
        "</think>",
        "{",
        "}",
        "####",
        "\\boxed{1}",
        "answer is ",
        "9,",
        "$",
        "\\frac{",
    ]
    done = subprocess.run([sys.executable, "-c", LONG, *tokens], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "done\n", (done.returncode, done.stderr[-500:])


@pytest.mark.slow
@pytest.mark.parametrize("matcher", list(MATCHERS))
def test_no_number_is_an_exception(matcher: str) -> None:
    """Python refuses to write integers of more than 4,300 digits; a coefficient may have them all the same."""
    power = "10^{1400}"
    huge = "*".join([power] * 5)
    answers = [
        f"{huge} x + 1",
        f"({huge})x+y",
        f"\\sqrt{{2}}*{huge}+x",
        f"x+{huge}/7",
        f"{huge}",
        f"1/({huge}) + x",
        f"\\{{{huge}x, 1\\}}",
    ]
    for answer in answers:
        for gold in ("5", "x+1", f"{huge} x + 1", "\\{1, x\\}", "(1,\\infty)"):
            assert grade(answer, gold, matcher=matcher).correct == (answer == gold)
            grade(gold, answer, matcher=matcher)
            grade_completion(f"\\boxed{{{answer}}}", gold, matcher=matcher)
    if matcher in ("symbolic", "symbolic_fast"):
        assert grade(f"1 + {huge} x", f"{huge} x + 1", matcher=matcher).correct
        assert not grade(f"2 + {huge} x", f"{huge} x + 1", matcher=matcher).correct


@pytest.mark.long
@pytest.mark.slow
def test_verdicts_are_kept_by_bytes() -> None:
    forget_verdicts()
    gold = "\\sqrt{2}+x"
    for number in range(3_000):
        grade(f"x+{number}+" + "y" * 3_000, gold)
    for number in range(30_000):
        grade(f"{number}", gold)
    grade("z" * 1_000_000, gold, matcher="exact")
    kept = [*_verdicts._young, *_verdicts._old]
    assert len(kept) > 1_000 and sum(sys.getsizeof(key[0]) for key in kept) < _CACHE_BYTES
    assert all(len(key[0]) < 200_000 for key in kept)


def test_each_answer_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reward, store and evaluation ask about the same completion; verdicts that a limit cut short are asked for again."""
    asked: list[str] = []

    def judge(answer: str, gold: str, limits: object) -> tuple[bool, str]:
        asked.append(answer)
        return (
            (False, "timeout")
            if answer == "slow"
            else (answer == gold, "equal_string" if answer == gold else "different")
        )

    monkeypatch.setitem(MATCHERS._entries, "counting", Matcher("counting", "counts", judge))  # type: ignore[arg-type]
    for answer in ("1", "2", "1", "2", "slow", "slow", " ", None):
        assert grade(answer, "1", matcher="counting").correct == (answer == "1")
    assert grade_completion("\\boxed{1}", "1", matcher="counting").correct
    grade_many([("2", "1"), ("1", "1")], matcher="counting")
    grade("1", ["7", "1"], matcher="counting")
    assert asked == ["1", "2", "slow", "slow", "1"]  # the last one against the gold 7


def test_golds_as_numbers_and_tensors() -> None:
    class Tensor:
        def __init__(self, value: object) -> None:
            self.value = value

        def tolist(self) -> object:
            return self.value

    for gold in (5, 5.0, Fraction(5), Tensor(5), Tensor(5.0), Tensor([4, 5]), [4, 5], ["4", "5"]):
        assert grade("5", gold).correct, gold
        assert not grade("6", gold).correct
        assert grade_completion("\\boxed{5}", gold).correct
    assert grade(5, "5").correct and not grade(6.5, 5).correct  # type: ignore[arg-type]
    assert grade("5", 10**5000).reason == "unparseable_gold"
    assert grade("0.5", 0.5).correct and grade("5", None).reason == "unparseable_gold"


def test_factors_that_differ_from_one_by_very_little() -> None:
    for exponent in (100, 900, 1_400):
        near = f"\\sqrt{{2}}\\cdot(1+10^{{-{exponent}}})"
        assert not grade(near, "\\sqrt{2}", timeout_s=5).correct
        assert not grade(f"x(1+10^{{-{exponent}}})", "x").correct
