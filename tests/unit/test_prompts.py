"""Prompt formats: what is rendered is parsed back; what is odd is flagged, never guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorist.errors import ConfigError
from algorist.prompts import FORMATS, get_format, missing_tags

TAGGED = [name for name in FORMATS if FORMATS.get(name).tags.all()]
words = st.text(alphabet="abc 0123456789+-*/=.\n", min_size=1).filter(lambda s: s.strip())
answers = st.from_regex(r"-?[0-9]{1,9}", fullmatch=True)


@pytest.mark.parametrize("name", list(FORMATS))
@given(reasoning=words, answer=answers)
def test_round_trip(name: str, reasoning: str, answer: str) -> None:
    form = get_format(name)
    parsed = form.parse(form.demonstrate(reasoning, answer))
    assert parsed.well_formed
    assert parsed.reasoning == reasoning.strip()
    assert parsed.answer == answer
    assert parsed.flags == ()


@pytest.mark.parametrize("name", TAGGED)
@given(text=st.text())
def test_parse_never_raises(name: str, text: str) -> None:
    parsed = get_format(name).parse(text)
    assert parsed.answer is None or parsed.answer == parsed.answer.strip()


@pytest.mark.parametrize(
    ("text", "answer", "well_formed", "flag"),
    [
        ("<reasoning>a</reasoning><answer>7</answer>", "7", True, None),
        ("  <reasoning>\na\n</reasoning>\n\n<answer>\n7\n</answer>\n", "7", True, None),
        ("<answer>7</answer>", "7", False, "no_reasoning"),
        ("<reasoning>so <answer>7</answer></reasoning>", None, False, "answer_in_reasoning"),
        ("<reasoning>a <answer>8</answer></reasoning><answer>7</answer>", "7", False, "answer_in_reasoning"),
        ("<reasoning>a</reasoning><answer>7</answer><answer>8</answer>", "8", False, "several_answers"),
        ("<reasoning>a</reasoning><answer>7</answer> done", "7", False, "text_after"),
        ("Sure! <reasoning>a</reasoning><answer>7</answer>", "7", False, "text_before"),
        ("<reasoning>a</reasoning><answer>7", None, False, "unclosed_answer"),
        ("<reasoning>a</reasoning><answer></answer>", None, False, None),
        ("", None, False, "no_reasoning"),
    ],
)
def test_stated_rules(text: str, answer: str | None, well_formed: bool, flag: str | None) -> None:
    parsed = get_format("reasoning_answer").parse(text)
    assert (parsed.answer, parsed.well_formed) == (answer, well_formed)
    assert flag is None or flag in parsed.flags


def test_a_prefilled_start_tag_counts_as_present() -> None:
    form = get_format("working_solution")
    assert form.parse("1+1=2<end_working_out>\n<SOLUTION>2</SOLUTION>").well_formed
    assert form.parse("<start_working_out>1+1=2<end_working_out><SOLUTION>2</SOLUTION>").well_formed
    assert form.prefill().startswith("<start_working_out>")


def test_boxes() -> None:
    form = get_format("question_only")
    assert form.parse(r"so \boxed{\frac{1}{2}}").answer == r"\frac{1}{2}"
    assert form.parse(r"\boxed{1} or \boxed{2}").flags == ("several_answers",)
    assert form.parse(r"\boxed{1").flags == ("unclosed_answer",)


def test_own_tags_and_system_prompt() -> None:
    form = get_format("reasoning_answer", tags={"answer_open": "<a>", "answer_close": "</a>"})
    assert form.parse("<reasoning>x</reasoning><a>3</a>").answer == "3"
    assert "<a>" in form.system_prompt
    plain = get_format("reasoning_answer", system_prompt="Just answer.")
    assert missing_tags(plain) == ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
    with pytest.raises(ConfigError, match="Did you mean 'answer_open'"):
        get_format("reasoning_answer", tags={"answer_opn": "<a>"})
    with pytest.raises(ConfigError, match="repeats"):
        get_format("reasoning_answer", tags={"answer_open": "<reasoning>"})
