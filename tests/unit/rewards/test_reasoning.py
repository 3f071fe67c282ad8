"""What is said inside the reasoning, or taken back, is no answer: in every prompt format, in free form, in the rewards."""

from __future__ import annotations

import pytest

from algorist.extensions.published_rewards.systems import question_only_reward_fn, r1_zero_reward_fn
from algorist.prompts import FORMATS, get_format
from algorist.rewards import build_rewards
from algorist_grader import extract, grade_completion

TAGGED = [name for name in FORMATS if FORMATS.get(name).tags.all()]


@pytest.mark.parametrize(
    "text",
    [
        "<think>perhaps \\boxed{32}</think> I do not know.",
        "<think>perhaps \\boxed{32}",
        "<reasoning>\\boxed{32}",
        "It is not \\boxed{32}.",
        "The answer is not equal to $\\boxed{32}$",
        "It isn't \\boxed{32}",
        "x \\ne \\boxed{32}",
        "\\boxed{32} or \\boxed{33}",
        "\\boxed{33}, \\boxed{32",
        "-\\boxed{32}",
        "$x = -\\boxed{32}$",
        "x = - \\boxed{32}",
        "2\\boxed{32}",
        "x\\boxed{32}",
        "\\pm\\boxed{32}",
        "5 - \\boxed{32}",
        "3 \\cdot \\boxed{32}",
        "1/\\boxed{32}",
        "\\frac{\\boxed{32}}5",
        "\\frac12\\boxed{32}",
        "\\sqrt{\\boxed{32}}",
        "\\sqrt\\boxed{32}",
        "x^{\\boxed{32}}",
        "\\boxed{32}^2",
        "$\\boxed{32}!$",
        "minus \\boxed{32}",
        "It is negative $\\boxed{32}$",
        "\\boxed{32}/5",
        "\\boxed{32}13",
        "\\boxed{32} + 5",
        "\\boxed{32}\\cdot 3",
        "\\boxed{32}\\pi",
        "\\boxed{32} \\pm 1",
        "\\cancel{\\boxed{32}} 33",
        "\\xcancel{$\\boxed{32}$}",
        "\\phantom{\\boxed{32}}",
        "\\verb|\\boxed{32}|",
        "% \\boxed{32}",
        "text % \\boxed{32}",
        "~~\\boxed{32}~~",
        "It cannot be \\boxed{32}",
        "not really \\boxed{32}",
        "not exactly the value \\boxed{32}",
        "33 rather than \\boxed{32}",
        "33 instead of \\boxed{32}",
        "neither 3 nor \\boxed{32}",
        "\\boxed{32} or 33",
        "$\\boxed{32}$ or maybe $33$",
        "\\boxed{32} is wrong",
        "$\\boxed{32}$, which is not the answer",
        "\\boxed{32} isn't right",
        "It isn’t \\boxed{32}",
        "-(\\boxed{32})",
        "-{\\boxed{32}}",
        "\\log\\boxed{32}",
        "\\boxed{32}{13}",
        "\\boxed{32}{}^2",
        "\\boxed{32}\\,13",
        "\\boxed{32}{,}000",
        "\\boxed{32},000",
        "\\boxed{32}.5",
        "\\boxed{32}e3",
        "\\boxed{32}:5",
        "\\boxed{32}(13)",
        "\\boxed{32}\\over 5",
        "\\boxed{32}\\choose 5",
    ],
)
def test_no_route_pays_it(text: str) -> None:
    assert not grade_completion(text, "32").correct
    assert not grade_completion(text, "32", parsed=get_format("question_only").parse(text)).correct
    if "or" not in text.replace("nor ", ""):  # the original pays the last of several boxes
        assert question_only_reward_fn(text, "32")["reward"] == 0.0
        assert build_rewards(["question_only"]).explain(text, "32").total == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "<think>first \\boxed{31}</think> It is \\boxed{32}.",
        "<think>\\boxed{31} and \\boxed{30}</think> \\boxed{32}, that is \\boxed{32.0}",
        "Not at all hard: \\boxed{32}",
        "It is not \\boxed{31}, it is \\boxed{32}.",
        "- \\boxed{32}",
        "**\\boxed{32}**",
        "**Answer:** \\boxed{32}",
        "Answer - \\boxed{32} - done",
        "$x = \\boxed{32}$ cm",
        "$$\\text{so } \\boxed{32}$$",
        "\\boxed{32}!",
        "\\boxed{32}, which is not a palindrome",
        "\\textcolor{red}{\\boxed{32}}",
        "\\boxed{32}\\%",
        "\\boxed{32}^\\circ",
        "\\$\\boxed{32}$",
        "$\\boxed{32}$ (a whole number)",
        "`\\boxed{32}`",
        "$4\\cdot8=\\boxed{32}\\text{ cm}$",
        "50% of 64 is \\boxed{32}",
        "It isn't obvious, but \\boxed{32} works",
        "\\boxed{32} or 32.0",
        "$4!+8=\\boxed{32}$ ways",
        "(\\boxed{32})",
        "\\begin{align*}x&=4\\cdot8\\\\&=\\boxed{32}\\end{align*}",
        "no number other than \\boxed{32} can work",
        "$x\\Rightarrow{\\boxed{32}}$",
        "1. \\boxed{32}",
        "2. The value is \\boxed{32}. 3. Done",
        "It is \\boxed{32}: 8 times 4, (1) as above",
        "$\\boxed{32}_{10}$",
    ],
)
def test_a_right_box_after_the_reasoning_is_paid(text: str) -> None:
    parsed = get_format("question_only").parse(text)
    assert grade_completion(text, "32").correct
    assert grade_completion(text, "32", parsed=parsed).correct, parsed
    assert question_only_reward_fn(text, "32")["reward"] == 1.0


@pytest.mark.parametrize("name", TAGGED)
def test_an_answer_block_in_reasoning_that_never_ends(name: str) -> None:
    prompt_format = get_format(name)
    t = prompt_format.tags
    for text in (
        f"{t.reasoning_open} I try {t.answer_open}32{t.answer_close}",
        f"{t.reasoning_open} a {t.reasoning_close} b {t.reasoning_open} {t.answer_open}32{t.answer_close}",
    ):
        parsed = prompt_format.parse(text)
        assert parsed.answer is None and "unfinished_reasoning" in parsed.flags, parsed
        assert "answer_in_reasoning" in parsed.flags and not parsed.well_formed
        verdict = grade_completion(text, "32", parsed=parsed)
        assert (verdict.correct, verdict.reason) == (False, "no_reasoning_close")
    right = prompt_format.parse(f"{t.reasoning_open} a {t.reasoning_close} {t.answer_open}32{t.answer_close}")
    assert right.answer == "32" and right.well_formed


@pytest.mark.parametrize("name", TAGGED)
def test_the_one_tag_that_is_missing_is_the_reason(name: str) -> None:
    prompt_format = get_format(name)
    t = prompt_format.tags
    whole = f"{t.reasoning_open} a {t.reasoning_close} {t.answer_open}32{t.answer_close}"

    def reason(text: str) -> str:
        verdict = grade_completion(text, "32", parsed=prompt_format.parse(text))
        assert verdict.correct == verdict.reason.startswith("equal")
        return verdict.reason

    for tag in ("reasoning_close", "answer_open", "answer_close"):
        assert reason(whole.replace(getattr(t, tag), "")) == f"no_{tag}"
    assert reason(whole.replace(t.reasoning_open, "")) == "equal_string"  # the answer can be read
    for text in (
        "",
        "32",
        t.reasoning_open + " a",
        whole.replace("32", " "),
        f"{t.reasoning_open} a {t.reasoning_close} 32",
        f"32{t.answer_close}",
    ):
        assert reason(text) == "no_answer", text


@pytest.mark.parametrize("name", TAGGED)
def test_answer_blocks_in_each_other_taken_back_or_equal(name: str) -> None:
    prompt_format = get_format(name)
    t = prompt_format.tags
    start = f"{t.reasoning_open} a {t.reasoning_close} "
    blocks = {
        "{o}33{o}32{c}": "ambiguous", "{o}1{o}2{o}32{c}": "ambiguous", "{o}33{c} {o}32{c}": "ambiguous", "It is not {o}32{c}": "no_answer",
        "{o}32{c} {o}32.0{c}": "equal_number", "{o}{o}32{c}": "equal_string", "not {o}33{c} but {o}32{c}": "equal_string",
    }  # fmt: skip
    for text, reason in blocks.items():
        completion = start + text.format(o=t.answer_open, c=t.answer_close)
        verdict = grade_completion(completion, "32", parsed=prompt_format.parse(completion))
        assert verdict.reason == reason, (completion, verdict)
        if t.answer_open == "<answer>":
            assert grade_completion(completion, "32").reason == reason, completion


@pytest.mark.parametrize("name", [n for n in TAGGED if FORMATS.get(n).prefilled_start])
def test_an_answer_without_any_reasoning_is_read_but_not_well_formed(name: str) -> None:
    t = get_format(name).tags
    parsed = get_format(name).parse(f" {t.answer_open}32{t.answer_close}")
    assert (parsed.answer, parsed.well_formed, parsed.flags) == ("32", False, ("no_reasoning", "text_before"))


@pytest.mark.parametrize("name", [n for n in TAGGED if FORMATS.get(n).prefilled_start])
def test_a_prefilled_reasoning_that_never_ends(name: str) -> None:
    t = get_format(name).tags
    assert get_format(name).parse(f"I try {t.answer_open}32{t.answer_close}").answer is None


def test_a_box_that_is_taken_back_inside_the_answer() -> None:
    assert r1_zero_reward_fn("a</think> <answer>not \\boxed{4}</answer>", "4")["reward"] == 0.0
    accuracy = build_rewards(["accuracy"])
    assert accuracy.explain("<think>a</think><answer>not \\boxed{4}</answer>", "$4$").total == 0.0
    assert accuracy.explain("<think>it is $4$", "$4$").total == 0.0
    assert accuracy.explain("<think>a</think><answer>\\boxed{4}</answer>", "$4$").total == 1.0


def test_reasoning_longer_than_what_is_looked_at() -> None:
    assert extract("<think>" + "a " * 200_000 + "\\boxed{5}").answer is None
    assert extract("<think>" + "a " * 200_000 + "</think>\\boxed{5}").answer == "5"


@pytest.mark.parametrize(
    "said",
    [
        "$30$ or $32$",
        "it is not $32$",
        "$30$, $32$",
        "$32$ or $30$",
        "not $32$",
        "$30$ and $32$",
        "30=32",
        "$30 = 32$",
    ],
)
def test_accuracy_takes_no_formula_out_of_a_hedge(said: str) -> None:
    accuracy = build_rewards(["accuracy"])
    assert accuracy.explain(f"<think>a</think><answer>{said}</answer>", "$32$").total == 0.0


@pytest.mark.parametrize("said", ["$32$", "so $x=32$", "as $a=1$ we find $32$", "\\boxed{32}"])
def test_accuracy_takes_the_last_formula(said: str) -> None:
    accuracy = build_rewards(["accuracy"])
    assert accuracy.explain(f"<think>a</think><answer>{said}</answer>", "$32$").total == 1.0
    assert accuracy.explain("<think>a</think><answer>$30$ or $32$</answer>", "$30$ or $32$").total == 1.0


@pytest.mark.parametrize(
    ("format_name", "text"),
    [
        ("reasoning_answer", "<reasoning>x</reasoning><answer>13<answer>12</answer>"),
        ("reasoning_answer", "<reasoning>x</reasoning>It is not <answer>12</answer>"),
        ("question_only", "-\\boxed{12}"),
        ("question_only", "\\frac{\\boxed{12}}{5}"),
        ("question_only", "\\boxed{12} is wrong"),
        ("question_only", "It is not really \\boxed{12}"),
        ("question_only", "\\cancel{\\boxed{12}} 13"),
        ("question_only", "\\phantom{\\boxed{12}}"),
    ],
)
def test_an_answer_that_is_not_stated_is_not_paid(format_name: str, text: str) -> None:
    assert not grade_completion(text, "12", parsed=get_format(format_name).parse(text)).correct


@pytest.mark.parametrize(
    ("format_name", "prompt", "text", "answer"),
    [
        ("reasoning_answer", "", "<think>Perhaps <answer>12</answer>, but let me check again", None),
        (
            "reasoning_answer",
            "",
            "<think>Perhaps <answer>12</answer></think><reasoning>no</reasoning><answer>13</answer>",
            "13",
        ),
        ("reasoning_answer", "", "<think>a</think><reasoning>b</reasoning><answer>12</answer>", "12"),
        ("reasoning_answer", "…<think>\n", "<answer>12</answer>, but wait", None),
        ("reasoning_answer", "…<think>\n", "hm</think><reasoning>no</reasoning><answer>13</answer>", "13"),
        ("question_only", "…<think>\n", "Okay, \\boxed{12}, wait", None),
        ("question_only", "…<think>\n", "Okay</think>\\boxed{12}", "12"),
        ("question_only", "…[THINK]", "\\boxed{12} wait", None),
        ("question_only", "…<think>\n\n</think>\n\n", "\\boxed{12}", "12"),
        ("think_answer", "", "I add.\n</think>\n\n<answer>\n12\n</answer>", "12"),
        ("think_answer", "…<think>\n", "I add.\n</think>\n\n<answer>\n12\n</answer>", "12"),
    ],
)
def test_thinking_that_never_ends_has_no_answer(
    format_name: str, prompt: str, text: str, answer: str | None
) -> None:
    """In the tags of other families, and where the chat template opened it in the prompt."""
    assert get_format(format_name).read(text, prompt).answer == answer
