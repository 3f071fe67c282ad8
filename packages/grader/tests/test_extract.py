"""Extraction in free form: the documented order, and what is never rewarded by accident."""

from __future__ import annotations

import pytest

from algorist_grader import boxed, extract, grade_completion, is_right_leniently, last_boxed
from algorist_grader.types import Parsed


@pytest.mark.parametrize(
    ("text", "answer", "marker"),
    [
        ("so <answer> 12 </answer>", "12", "<answer>"),
        ("<SOLUTION>12</SOLUTION>", "12", "<SOLUTION>"),
        ("<answer>\\boxed{12}</answer>", "12", "<answer>"),
        ("thus \\boxed{\\frac{1}{2}} and done", "\\frac{1}{2}", "\\boxed"),
        ("\\boxed{a{b{c}}}", "a{b{c}}", "\\boxed"),
        ("\\fbox{7}", "7", "\\boxed"),
        ("step\n#### 72", "72", "####"),
        ("#### $1,234 ", "$1,234", "####"),
        ("The final answer is 5.", "5", "the answer is"),
        ("A: 18", "18", "the answer is"),
        ("answer: 5 apples", "5 apples", "the answer is"),
        ("<think>1 \\boxed{2}</think>\\boxed{3}", "3", "\\boxed"),
        ("<reasoning>it is 4</reasoning><answer>5</answer>", "5", "<answer>"),
        ("<answer>5</answer> \\boxed{6}", "5", "<answer>"),
        ("\\boxed{5} #### 6", "5", "\\boxed"),
        ("\\boxed{1/2} so \\boxed{0.5}", "0.5", "\\boxed"),
        ("<answer>3</answer> again <answer>3.0</answer>", "3.0", "<answer>"),
    ],
)  # fmt: skip
def test_found(text: str, answer: str, marker: str) -> None:
    found = extract(text)
    assert (found.answer, found.marker, found.ambiguous) == (answer, marker, False)


@pytest.mark.parametrize(
    "text",
    [
        "", "   ", "I do not know", "12", "it is 12", "<answer></answer>", "<answer> </answer>", "<answer>12", "\\boxed{12", "\\boxed",
        "<think>\\boxed{12}", "<think>the answer is 12</think>", "<reasoning><answer>12</answer>", "</answer>12<answer>",
        "<think>#### 12</think> hm", "####", "the answer", "<think></think>", "<start_working_out><SOLUTION>12</SOLUTION>",
    ],
)  # fmt: skip
def test_nothing_found(text: str) -> None:
    assert extract(text).answer is None
    verdict = grade_completion(text, "12")
    assert (verdict.correct, verdict.reason) == (False, "no_answer")


@pytest.mark.parametrize(
    "text",
    [
        "<answer>12</answer><answer>13</answer>",
        "<answer>13</answer><answer>12</answer>",
        "\\boxed{12} or \\boxed{15}",
        "\\boxed{12}\n\\boxed{x}",
        "#### 12\n#### 13",
        "the answer is 12. No, the answer is 13",
        "<answer>12</answer>" * 9 + "<answer>13</answer>",
        "".join(f"<answer>{n}</answer>" for n in range(100)),
    ],
)
def test_two_answers(text: str) -> None:
    for gold in ("12", "13", "99"):
        verdict = grade_completion(text, gold)
        assert verdict.correct is False
        assert verdict.reason == ("unparseable_answer" if "the answer" in text else "ambiguous")


def test_last_number_only_when_asked() -> None:
    assert extract("so 3 and then 1,234.5 in all").answer is None
    assert extract("so 3 and then 1,234.5 in all", last_number=True).answer == "1,234.5"
    assert extract("none here", last_number=True).answer is None
    assert extract("\\boxed{3} and 4", last_number=True).answer == "3"


def test_the_prompt_echoed_is_no_answer() -> None:
    prompt = "Put the answer into <answer> tags. What is 5 + 7?"
    assert extract(prompt).answer is None
    assert grade_completion(prompt + " " + prompt, "12").correct is False


def test_a_format_that_parsed_it_decides() -> None:
    parsed = Parsed("r", "12", True)
    assert grade_completion("\\boxed{13}", "12", parsed=parsed).correct
    several = Parsed("r", "12", False, ("several_answers",))
    assert grade_completion("x", "12", parsed=several).reason == "ambiguous"
    assert grade_completion("\\boxed{12}", "12", parsed=Parsed(None, None, False)).reason == "no_answer"


def test_boxes() -> None:
    assert boxed("\\boxed{1} \\boxed{\\boxed{2}} \\boxed {3}") == ["1", "\\boxed{2}", "3"]
    assert last_boxed("\\boxed{1} \\boxed{2}") == "2"
    assert last_boxed("\\boxed{1} \\boxed{2") is None
    assert last_boxed("none") is None
    assert last_boxed("\\boxed{\\{1\\}}") == "\\{1\\}"


@pytest.mark.parametrize(
    "text, gold, right",
    [
        ("So Tom has 12 apples.", "12", True),
        ("<answer>13</answer> I mean 1,250.", "1250", True),
        ("It costs $4.50, so", "4.5", True),
        ("12 apples, then 3 more", "12", False),
        ("no number at all", "12", False),
        ("x = 2", "x^2", False),  # the last number says nothing about a gold answer that is none
        ("7", ["6", "7"], True),
    ],
)
def test_lenient_is_the_last_number(text: str, gold: str | list[str], right: bool) -> None:
    assert is_right_leniently(text, gold) is right
