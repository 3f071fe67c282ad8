"""Prompt formats: what is rendered is parsed back; what is odd is flagged, never guessed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorist.config.load import load_recipe
from algorist.config.section import ModelSection
from algorist.errors import ConfigError
from algorist.models.load import make_policy, prepare_tokenizer
from algorist.prompts import FORMATS, get_format, missing_tags
from algorist.prompts.attached import Asked
from algorist.prompts.chat import attach, render_prompt
from algorist.runs.asking import asked_as_trained, recipe_format

TAGGED = [name for name in FORMATS if FORMATS.get(name).tags.all()]
words = st.text(alphabet="abc 0123456789+-*/=.\n", min_size=1).filter(lambda s: s.strip())
answers = st.from_regex(r"-?[0-9]{1,9}", fullmatch=True)


@pytest.mark.slow
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
    assert form.parse(r"\boxed{1}. So it is \boxed{2}").flags == ("several_answers",)
    assert form.parse(r"\boxed{1} or \boxed{2}").answer == "1, 2"
    assert form.parse(r"\boxed{1").flags == ("unclosed_answer",)


def test_own_tags_and_system_prompt() -> None:
    form = get_format("reasoning_answer", tags={"answer_open": "<a>", "answer_close": "</a>"})
    assert form.parse("<reasoning>x</reasoning><a>3</a>").answer == "3"
    assert "<a>" in form.system_prompt
    plain = get_format("reasoning_answer", system_prompt="Just answer.")
    assert missing_tags(plain) == ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
    with pytest.raises(ConfigError, match="Did you mean 'answer_open'"):
        get_format("reasoning_answer", tags={"answer_opn": "<a>"})
    for tag in ("", " ", "<reasoning>", "<reasoning>\n"):
        with pytest.raises(ConfigError, match="four texts that differ and are not blank"):
            get_format("reasoning_answer", tags={"answer_close": tag})
    assert get_format("question_only", tags={"answer_close": ""}).parse("\\boxed{1}").answer == "1"
    with pytest.raises(ConfigError, match="prompt format boxed has no tags; leave them out"):
        get_format("boxed", tags={"answer_open": "<a>"})


TINY = ModelSection.model_validate(
    {"name": "tiny", "tiny": {"hidden_size": 32, "layers": 2, "vocab_size": 400}}
)


TEXTS = ["Tom has 14 apples. Tom buys 3 more. How many apples does Tom have?"] * 20


CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["reasoning_answer", "working_solution", "think_answer"])
def test_each_tag_stands_on_its_own_line(name: str) -> None:
    form = get_format(name)
    lines = (form.prefill() + form.demonstrate("6 * 7", "42")).split("\n")
    gap = [] if name != "think_answer" else [""]
    t = form.tags
    assert lines[:3] == [t.reasoning_open, "6 * 7", t.reasoning_close]
    assert lines[3:] == [*gap, t.answer_open, "42", t.answer_close]


@pytest.mark.parametrize("name", ["reasoning_answer", "working_solution", "think_answer"])
def test_system_prompts_show_their_tags(name: str) -> None:
    form = get_format(name)
    assert all(tag in form.system_prompt for tag in form.tags.all())
    assert form.system_prompt == form.system_prompt.strip()
    if name == "reasoning_answer":
        assert form.system_prompt.count("\n...\n") == 2
    if name == "working_solution":
        assert form.system_prompt.count("\n") == 3  # four lines


def test_a_prompt_is_a_system_and_a_user_message() -> None:
    rendered = get_format("working_solution").render("  1 + 1? \n")
    assert isinstance(rendered, list)
    assert [m["role"] for m in rendered] == ["system", "user"] and rendered[1]["content"] == "1 + 1?"


def test_the_published_text_of_a_raw_format_can_be_used() -> None:
    text = "A conversation between User and Assistant, as published.\nUser: {question}\nAssistant: <think>"
    form = get_format("r1_zero", system_prompt=text)
    assert form.render(" 1 + 1? ") == text.replace("{question}", "1 + 1?")
    assert form.parse("so </think> <answer> 2 </answer>").well_formed
    assert get_format("r1_zero", system_prompt="") == get_format("r1_zero")
    for wrong in ("Think first.", text.removesuffix(" <think>")):
        with pytest.raises(ConfigError, match=r"whole prompt with \{question\} .* that ends with <think>"):
            get_format("r1_zero", system_prompt=wrong)


def test_raw_prompts() -> None:
    text = get_format("r1_zero").render("1 + 1?")
    assert isinstance(text, str)
    assert text.endswith("\nUser: 1 + 1?\nAssistant: <think>") and text.count("\n") == 2
    assert "</think> <answer>" in text
    assert get_format("question_only").render("1 + 1?") == "1 + 1?"


def test_system_prompt_from_a_file_is_stripped(tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text("\n  Réponds en <answer>.\n\n", encoding="utf-8")
    recipe = load_recipe("oneshot-gsm8k", [f"prompt.system_prompt_path={file}"]).recipe
    assert recipe_format(recipe).system_prompt == "Réponds en <answer>."
    with pytest.raises(ConfigError, match="system_prompt_path"):
        recipe_format(load_recipe("oneshot-gsm8k", [f"prompt.system_prompt_path={tmp_path}/no"]).recipe)


def test_a_system_prompt_without_tags_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    asked_as_trained(load_recipe("oneshot-gsm8k").recipe)
    assert not caplog.records
    asked_as_trained(load_recipe("oneshot-gsm8k", ["prompt.system_prompt=Just answer."]).recipe)
    assert "never shows <reasoning>, </reasoning>, <answer>, </answer>" in caplog.text


def test_chat_template_of_the_recipe_takes_any_text() -> None:
    recipe = load_recipe("sft-grpo-dapo").recipe
    section = TINY.model_copy(update={"chat_template": recipe.model.chat_template})
    tags = get_format("working_solution").tags.all()
    tokenizer = make_policy(section, device=CPU, seed=0, texts=TEXTS, tags=tags).tokenizer
    form = replace(recipe_format(recipe), system_prompt="It's {{ 'so' }}: {% raw %}")
    text = render_prompt(form, tokenizer, "What's 15 * 23?")
    end = str(tokenizer.eos_token)
    assert text == f"It's {{{{ 'so' }}}}: {{% raw %}}{end}What's 15 * 23?<start_working_out>\n"


def test_a_tokenizer_without_template_and_pad_gets_both() -> None:
    tokenizer = make_policy(TINY, device=CPU, seed=0, texts=TEXTS).tokenizer
    tokenizer.pad_token, tokenizer.chat_template = None, None
    prepare_tokenizer(tokenizer, None)
    assert tokenizer.pad_token == tokenizer.eos_token
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert asked == "s\n\nUser: q\nAssistant: "
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "s\n\nUser: q\n"


@pytest.mark.parametrize("before", ["", "\n", "\r\n", "\n\n"])
def test_a_bare_question_is_the_trained_prompt_whatever_the_template_begins_with(before: str) -> None:
    tokenizer = make_policy(TINY, device=CPU, seed=0, texts=TEXTS).tokenizer
    tokenizer.chat_template = before + tokenizer.chat_template
    form = get_format("reasoning_answer")
    trained = render_prompt(form, tokenizer, "1 + 1?")
    attach(tokenizer, Asked(form, 64))
    bare = [{"role": "user", "content": "1 + 1?"}]
    assert tokenizer.apply_chat_template(bare, tokenize=False, add_generation_prompt=True) == trained
    assert render_prompt(form, tokenizer, "1 + 1?") == trained
