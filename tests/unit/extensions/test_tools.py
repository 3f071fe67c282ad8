"""The calculator, how calls are written, replies and their limits, a user's tools and environments."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorist.config import load_recipe
from algorist.data.rollouts import read_demonstration
from algorist.errors import ConfigError, TrainingError
from algorist.extensions.problem_sets.arithmetic import equations
from algorist.extensions.problem_sets.story_problems import story_problems
from algorist.extensions.toolbox.base import ToolLimits
from algorist.extensions.toolbox.calculator import Calculator, NotArithmetic, as_text, last_sum, value_of
from algorist.extensions.tools.formats import CallFormat
from algorist.extensions.tools.section import ToolsSection
from algorist.extensions.tools.source import Tools
from algorist.extensions.tools.watch import FailingBatches, turn_metrics
from algorist.models.tiny import train_tokenizer
from algorist.objectives import Objective, advantage_named, loss_named
from algorist.prompts import get_format
from algorist.prompts.attached import Asked, attached
from algorist.prompts.base import PromptFormat
from algorist.prompts.chat import attach
from algorist.rewards import build_rewards
from algorist.rollouts.base import Completions, Prompts, SamplingParams, Turns
from algorist.rollouts.collect import collect
from algorist.rollouts.row_state import Rows
from algorist.training.extension import Extensions
from algorist.training.objective import advantages_of, useful
from algorist.training.sft import demonstrations, tokenize_demonstrations
from algorist.types import Group, Problem, Rollout

EQUALS = CallFormat("equals", ("calculator",))
TAGS = CallFormat("tags", ("calculator", "python"), ("calculator",))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*34", "408"),
        ("290 / 2", "145"),
        ("1/3", "0.3333"),
        ("-1/3", "-0.3333"),
        ("10/4", "2.5"),
        ("1,234 + 1", "1235"),
        ("2^10 - 2**3", "1016"),
        ("-3 * -2", "6"),
        ("-2**2", "-4"),
        ("2**-2", "0.25"),
        ("4**0.5", "2"),
        ("7 // 2 + 7 % 3", "4"),
        ("2 × (3 + 4) ÷ 7", "2"),
        ("0.1 + 0.2", "0.3"),
        (".5 * 3", "1.5"),
        ("1/30000", "3.333e-05"),
        ("99999 * 99999 * 99999", "999970000299999"),
    ],
)
def test_sums_are_exact(expression: str, value: str) -> None:
    assert Calculator(ToolLimits()).call(expression, None).text == value


@pytest.mark.parametrize(
    "text",
    ["", "...", "1 + ...", "1 +", "(1", "1)", "3(4)", "1e5", "x + 1", "1..2", "9**9**9", "2**0.5", "1/0", "0**-1", "(" * 150, "1+" * 300,
     "9" * 150, "9**99 * 9**99", "__import__('os')", "1 if 1 else 2", "[1]*9", "\ud800", "½", "--" * 60 + "1", "lambda: 1"],
)  # fmt: skip
def test_what_is_no_sum_is_an_error(text: str) -> None:
    output = Calculator(ToolLimits()).call(text, None)
    assert output.error == "NotArithmetic" and output.text.startswith("Error: ")


@pytest.mark.slow
@given(st.recursive(st.integers(0, 10**6).map(str), lambda e: st.tuples(e, st.sampled_from("+-*/"), e).map(lambda t: f"({t[0]} {t[1]} {t[2]})"), max_leaves=6))  # fmt: skip
def test_sums_are_those_of_python(expression: str) -> None:
    try:
        expected = eval(__import__("re").sub(r"(\d+)", r"Fraction(\1)", expression), {"Fraction": Fraction})
    except ZeroDivisionError:
        expected = None
    try:
        found = value_of(expression)
    except NotArithmetic:
        found = None
    assert found == expected
    if found is not None and found.denominator in (1, 2, 4, 5, 8, 10):
        assert Fraction(as_text(found)) == found


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("Tom has 3 apples. 5 + 3 ", "5 + 3"),
        ("12*(3+4)", "12*(3+4)"),
        ("cost: $3.50 * 2 ", "3.50 * 2"),
        ("x = 4 - 1 ", "4 - 1"),
        ("the house: $80,000 + $50,000 ", "80,000 + $50,000"),
        ("9 x 60 ", "9 x 60"),
        ("2.0x5 ", "2.0x5"),
        ("0 x 5 ", "0 x 5"),
        ("a box 5 - 3 ", "5 - 3"),
        ("2 x ", None),
        ("0x10 ", None),
        ("1,200 - 1 ", "1,200 - 1"),
        ("7\n8 + 1 ", "8 + 1"),
        ("x ", None),
        ("5 ", None),
        (" + 3 ", None),
        ("-5 ", None),
        ("1/0 ", None),
    ],
)
def test_an_equals_sign_calls_the_calculator(text: str, expression: str | None) -> None:
    assert last_sum(text) == expression
    call = EQUALS.find(f"{text}=")
    assert (call.request if call else None) == expression


def test_calls_in_tags_and_in_chat_templates() -> None:
    assert TAGS.find("a <python>x = 1\nx</python>").request == "x = 1\nx"  # type: ignore[union-attr]
    both = TAGS.find("<calculator>1</calculator> <python>3</python>\n")
    assert both is not None and (both.tool, both.request) == ("python", "3")
    assert TAGS.find("3</python>") is None
    chat = CallFormat("chat", ("python",))
    asked = {"name": "python", "arguments": {"code": "1 + 1"}}
    for arguments in (asked["arguments"], json.dumps(asked["arguments"])):
        text = f"<tool_call>\n{json.dumps({**asked, 'arguments': arguments})}\n</tool_call>"
        assert chat.find(text).request == "1 + 1"  # type: ignore[union-attr]
    for odd in ("{", "[]", "{}", '{"name": "x"}', "[" * 10000, '{"name": "python", "arguments": {}}'):
        assert chat.find(f"<tool_call>{odd}</tool_call>").tool == ""  # type: ignore[union-attr]


LLAMA = """{% if tools %}<|head|>system<|end|>
{{ tools | tojson }}{{ eos_token }}{% endif %}{% for m in messages %}<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end|>
{{ m.content | tojson if m.role == 'tool' else m.content }}{{ eos_token }}{% endfor %}<|head|>assistant<|end|>{{ '\n' }}"""
CHATML = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{{ '<tool_response>' + m.content + '</tool_response>' if m.role == 'tool' else m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant{{ '\n' }}"""


@pytest.mark.parametrize(
    ("call", "template", "message"),
    [
        ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>', CHATML,
         "<|im_end|>\n<|im_start|>user\n<tool_response>42</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        ('<tool_call>[{"name": "calculator", "arguments": {"expression": "6 * 7"}}]</tool_call>', CHATML,
         "<|im_end|>\n<|im_start|>user\n<tool_response>42</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        ('{"name": "calculator", "parameters": {"expression": "6 * 7"}}<|im_end|>', LLAMA,
         '<|head|>ipython<|end|>\n"42"<|im_end|><|head|>assistant<|end|>\n'),
    ],
    ids=["Qwen, SmolLM3", "SmolLM2", "Llama"],
)  # fmt: skip
def test_each_templates_own_form_of_a_call_is_answered_in_it(call: str, template: str, message: str) -> None:
    form = form_with(use=["calculator"], format="chat")
    row, plain = rollouts_of(form, f"{call}<answer>42</answer>", '{"name": "x"}', template=template)
    assert [(t.source, t.request, t.reply, t.error) for t in row.turns] == [("calculator", "6 * 7", "42", "")]
    assert tokenizer_with(form).decode(row.completion_ids).startswith(f"{call}{message}<answer>")
    assert row.parsed.answer == "42" and plain.turns == ()


@pytest.mark.parametrize("form", [EQUALS, TAGS], ids=lambda f: f.name)
def test_worked_solutions_become_calls(form: CallFormat, real_data: Path) -> None:
    """Each call's output is found again as a reply, its value is the calculator's, and no number of a solution is lost."""
    texts = [p.solution for p in story_problems(100, seed=5)] + [p.solution for p in equations(30)]
    rows = [json.loads(line) for line in (real_data / "gsm8k" / "train.jsonl").read_text().splitlines()]
    annotated = [row["answer"].partition("####")[0] for row in rows]
    calls = 0
    for text in texts + annotated:
        worked = form.worked(text)
        assert "<<" not in worked
        spans = form.replies(worked)
        for begin, end in spans:
            call = form.find(worked[:begin])
            assert call is not None and call.tool == "calculator"
            before, after = form.around("calculator", worked[:begin])
            assert (
                worked[begin:end] == before + Calculator(ToolLimits()).call(call.request, None).text + after
            )
        calls += len(spans)
        last = text.rstrip(". \n").split()[-1]
        assert last.isdigit() is False or last in worked
    assert calls > 450
    assert (
        form.replies(form.worked("5 + 5 = 11")) == []
    )  # another result than the calculator's stays as it is


class Script:
    """An engine that writes given texts, through the bookkeeping that all engines share."""

    name = "script"

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self.tokenizer = tokenizer
        self.ids = [
            [*tokenizer(t, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for t in texts
        ]

    def generate(
        self, prompts: Prompts, group_size: int, params: SamplingParams, turns: Turns | None = None
    ) -> Completions:
        size = len(self.tokenizer)
        rows = Rows(
            prompts, group_size, params, stop_ids=[self.tokenizer.eos_token_id], vocabulary=size,
            context=None, device=torch.device("cpu"), decode=self.tokenizer.decode, turns=turns,
        )  # fmt: skip
        rows.admit(range(rows.count))
        written = [0] * rows.count
        while len(rows):
            script = [self.ids[row % len(self.ids)] for row in rows.row_S.tolist()]
            due = [
                ids[min(written[row], len(ids) - 1)]
                for ids, row in zip(script, rows.row_S.tolist(), strict=True)
            ]
            logits = torch.zeros(len(rows), size)
            logits[range(len(rows)), due] = 50.0
            before = rows.row_S.tolist()
            _, done = rows.take(logits)
            for row in before:
                own = rows.turns._sampled.get(row, []) if rows.turns else []
                written[row] = sum(own) if rows.turns else written[row] + 1
            rows.finish(done.nonzero().view(-1))
            rows.keep((~done).nonzero().view(-1))
        return rows.completions()


def tokenizer_with(form: PromptFormat) -> Any:
    return train_tokenizer(["what is 12 + 30 = 42 the answer x print"] * 3, vocab_size=400, tags=form.markers)


def rollouts_of(
    form: PromptFormat, *texts: str, limit: int = 300, template: str | None = None
) -> list[Rollout]:
    tokenizer = tokenizer_with(form)
    tokenizer.chat_template = template or tokenizer.chat_template
    params = SamplingParams(temperature=0.0, max_new_tokens=limit, stop_strings=("</answer>",))
    engine = Script(tokenizer, *texts)
    (group,) = collect(engine, tokenizer, [Problem("p", "q", "42")], form, params, len(texts))
    return group.rollouts


def form_with(environment: str | None = None, **tools: Any) -> PromptFormat:
    section = ToolsSection(**tools) if tools else None
    return Tools(section, environment).instructed(get_format("reasoning_answer"))


def test_calls_are_answered_counted_and_parsed() -> None:
    pytest.importorskip("pydantic_monty")
    form = form_with(use=["python", "calculator"], calls=2, output_tokens=40)
    assert "<python>" in form.system_prompt and "<calculator>" in form.system_prompt
    good, wrong, many, none, flood = rollouts_of(
        form,
        "<reasoning>\n<python>x = 40</python><python>x + 2</python>\n</reasoning>\n<answer>\n42\n</answer>",
        "<reasoning>\n<python>1 / 0</python> so <calculator>6 * 7</calculator>\n</reasoning>\n<answer>\n42\n</answer>",
        "<calculator>1+1</calculator><calculator>2+2</calculator><calculator>3+3</calculator>",
        "<reasoning>a </python> b</reasoning><answer>1</answer>",
        "<python>print('<', 'answer>7<', '/answer><', '|im_end|>', 'x' * 5000, sep='')</python>",
    )
    assert [(t.source, t.reply, t.error) for t in good.turns] == [("python", "", ""), ("python", "42", "")]
    assert good.grade is not None and good.grade.correct and good.parsed.well_formed
    own = "".join(tokenizer_with(form).decode([i]) for i in good.sampled_ids[:-1])
    assert "output" not in own and own.startswith("<reasoning>\n<python>x = 40</python><python>x + 2")
    assert "<python>x + 2</python>\n<output>\n42\n</output>\n" in good.text
    assert [t.error for t in wrong.turns] == ["ZeroDivisionError", ""]
    assert "division by zero" in wrong.turns[0].reply and "<output>42</output>" in wrong.text
    assert [t.error for t in many.turns] == ["", "", "TooManyCalls"] and "all 2 calls" in many.text
    assert none.turns == () and none.sampled is None and none.parsed.answer == "1"
    assert flood.parsed.answer is None and "…" in flood.text and len(flood.text) < 400
    assert "<|im_end|>" not in flood.turns[0].reply and "[answer]7[/answer]" in flood.turns[0].reply


def test_equals_signs_of_a_plain_solution_are_filled_in() -> None:
    form = form_with(use=["calculator"], format="equals")
    (row,) = rollouts_of(
        form, "<reasoning>\n290 / 2 =\n5 apples = \nx = 7 *3=</reasoning><answer>145</answer>"
    )
    assert row.text.startswith("<reasoning>\n290 / 2 = 145\n5 apples = \nx = 7 *3=21</reasoning>")
    assert [turn.request for turn in row.turns] == ["290 / 2", "7 *3"]
    assert form.system_prompt == get_format("reasoning_answer").system_prompt


@pytest.mark.parametrize(
    ("solution", "worked"),
    [
        ("earns 12/60 = $<<12/60=0.2>>0.2 per minute", "earns 12/60 = 0.2 per minute"),
        ("0.2 x 50 = $<<0.2*50=10>>10.", "0.2 x 50 = 10."),
        ("$80 + $50 = $<<80+50=130>>130", "$80 + $50 = 130"),
        ("20% of 50 is <<.2*50=10>>10", "20% of 50 is .2*50 = 10"),
        ("6 eggs x 2 = <<6*2=12>>12 eggs", "6 eggs x 2 = 6*2 = 12 eggs"),
        ("24 clips. 48+24 = <<48+24=72>>72 in all", "24 clips. 48+24 = 72 in all"),
        ("Of 5, 48+24 = <<48+24=72>>72, then more", "Of 5, 48+24 = 72, then more"),
        ("She has 10-3=7, then sleeps.", "She has 10-3 = 7, then sleeps."),
        ("Costs 5, 500 + 600=1,100, it is", "Costs 5, 500 + 600 = 1100, it is"),
    ],
)
def test_sums_as_people_write_them_are_calls(solution: str, worked: str) -> None:
    """GSM8K's sums have currency signs and an x for times; those were written twice."""
    assert EQUALS.worked(solution) == worked
    ((begin, end),) = EQUALS.replies(worked)
    call = EQUALS.find(worked[:begin])
    assert (
        call is not None
        and worked[begin:end].strip() == Calculator(ToolLimits()).call(call.request, None).text
    )


def test_a_chains_second_result_is_the_policys_own() -> None:
    """No tool writes it: a call ends at the output before it."""
    assert EQUALS.replies("3 + 4 = 7 + 2 = 9") == [(7, 9)]
    (row,) = rollouts_of(form_with(use=["calculator"], format="equals"), "3 + 4 = + 2 = 9")
    assert [turn.request for turn in row.turns] == ["3 + 4"]
    assert TAGS.worked("It is so. 48 + 24 = 72") == (
        "It is so. <calculator>48 + 24</calculator><output>72</output>"
    )


def test_the_length_limit_counts_outputs() -> None:
    form = form_with(use=["calculator"])
    long = rollouts_of(form, "<calculator>1+1</calculator> and more and more", limit=10)[0]
    assert len(long.completion_ids) == 10 and long.truncated
    assert long.turns[0].reply == "2"
    at_once = rollouts_of(form, "<calculator>1+1</calculator> and more", limit=5)[0]
    assert at_once.truncated and not at_once.turns and at_once.sampled is None


OWN = '''
def shout(request):
    """a word"""
    if request == "hang":
        while True:
            pass
    if request == "raise":
        raise LookupError("no such word")
    return request.upper()
'''
BROKEN = """
class Broken:
    def start(self, problem):
        raise LookupError("no board")
    def reply(self, rollout):
        return "again"
"""
ENVIRONMENTS = Path(__file__).parents[3] / "examples" / "environments.py"


@pytest.mark.slow
def test_own_tools_run_in_a_process_that_can_be_ended(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    form = form_with(use=[f"{file}:shout"], seconds=0.5)
    assert form.turns is not None and "<shout>a word</shout>" in form.system_prompt
    form.turns.check()  # type: ignore[attr-defined]
    text = "<shout>hello</shout><shout>raise</shout><shout>hang</shout><shout>again</shout>"
    turns = rollouts_of(form, text)[0].turns
    assert [(t.reply, t.error) for t in turns] == [
        ("HELLO", ""),
        ("LookupError: no such word", "LookupError"),
        ("TimeoutError: it took longer than 0.5 s", "TimeoutError"),
        ("AGAIN", ""),
    ]
    with pytest.raises(ConfigError, match=r"has no function 'shut'.*Did you mean 'shout'"):
        Tools(ToolsSection(use=[f"{file}:shut"])).check()
    with pytest.raises(ConfigError, match=r"unknown tool 'calcu'.*Did you mean 'calculator'"):
        Tools(ToolsSection(use=["calcu"])).check()


def test_all_rows_of_a_batch_may_call_at_once() -> None:
    """Each row gets the outputs of its own calls and variables, however many wait for a worker."""
    pytest.importorskip("pydantic_monty")
    form = form_with(use=["python"])
    texts = [f"<python>x = {n}</python><python>x * 2</python>" for n in range(40)]
    rows = rollouts_of(form, *texts)
    assert [[turn.reply for turn in row.turns] for row in rows] == [["", str(2 * n)] for n in range(40)]


def test_a_stop_string_that_ends_a_call_ends_the_row() -> None:
    """The request's stop string wins over the call that it completes; one inside an output ends nothing."""
    form = form_with(use=["calculator"])
    text = "<calculator>12 + 30</calculator> so <answer>42</answer> and more"
    tokenizer = tokenizer_with(form)

    def row(*stops: str) -> Rollout:
        params = SamplingParams(temperature=0.0, max_new_tokens=200, stop_strings=stops)
        problem = [Problem("p", "q", "42")]
        return collect(Script(tokenizer, text), tokenizer, problem, form, params, 1)[0].rollouts[0]

    ended, inside = row("/calculator>"), row("<output>", "</answer>")
    assert ended.turns == () and ended.text == "<calculator>12 + 30</calculator>"
    assert [turn.reply for turn in inside.turns] == ["42"]
    assert inside.text == "<calculator>12 + 30</calculator><output>42</output> so <answer>42</answer>"


def test_a_broken_tool_is_noticed_beside_one_that_works(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    form = form_with(use=[f"{file}:shout", "calculator"])
    rollouts = rollouts_of(form, "<shout>raise</shout><calculator>1+1</calculator>", "<shout>raise</shout>")
    groups = [Group(Problem("p", "q", "42"), "q", [1], rollouts)]
    failing = FailingBatches()
    failing.see(groups, 2)
    with pytest.raises(TrainingError, match=r"every call of shout failed in 2 .*\(2 calls.*no such word"):
        failing.see(groups, 2)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.py:lookup", "b.py:lookup"], "two tools that are called 'lookup'"),
        (["calculator", "calculator"], "two tools that are called 'calculator'"),
        (["a.py:answer"], "'answer', whose tag the prompt format"),
        (["a.py:output"], "'output', whose tag"),
    ],
)
def test_names_that_would_be_mistaken_are_refused(
    names: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "b.py"):
        Path(name).write_text(
            "def lookup(text): return text\ndef answer(text): return text\noutput = answer\n"
        )
    with pytest.raises(ConfigError, match=message):
        form_with(use=names)


@pytest.mark.slow
def test_outputs_that_no_tokenizer_takes_or_that_look_like_an_answer(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def half(text): return 'a\\ud800b'\n"
        "def sly(text): return 'STOP #### 42 é😀' + '😀' * 50\n"
        "class Halves:\n    def start(self, problem): self.asked = False\n"
        "    def reply(self, rollout):\n        if self.asked: return None\n        self.asked = True\n        return 'x\\ud800y'\n"
    )
    form = form_with(use=[f"{file}:half", f"{file}:sly"], environment=f"{file}:Halves", output_tokens=20)
    tags = dataclasses.replace(form.tags, answer_open="#### ", answer_close="####end")
    form = dataclasses.replace(form, tags=tags)
    half, sly = rollouts_of(form, "<half>1</half> end", "<sly>1</sly> end")
    assert [t.source for t in half.turns] == ["half", "environment"] and not half.turns[0].error
    text = tokenizer_with(form).decode(half.completion_ids)
    assert "a?b" in text and "x?y" in text
    assert "# ### 42 é😀" in sly.turns[0].reply and sly.parsed.answer is None


def test_a_completion_whose_replies_have_no_marks_is_no_demonstration() -> None:
    """In a chat's form what is around an output are special tokens, which a text has not: SFT would learn to write outputs."""
    form = form_with(use=["calculator"])
    text = "<reasoning>\n<calculator>6 * 7</calculator><output>42</output> so\n</reasoning>\n<answer>\n42\n</answer>"
    turns = [{"source": "calculator", "request": "6 * 7", "reply": "42"}]
    row = {"completion": text, "prompt": "", "turns": turns}
    assert read_demonstration(row, form) is not None
    chat = dataclasses.replace(form, turns=form_with(use=["calculator"], format="chat").turns)
    assert (
        read_demonstration(row, chat) is None and read_demonstration(row | {"turns": None}, chat) is not None
    )


def test_a_model_that_knows_its_tools_is_told_of_them_once() -> None:
    form = form_with(use=["calculator"])
    again = Tools(ToolsSection(use=["calculator"])).instructed(form)
    assert again.system_prompt == form.system_prompt and again.system_prompt.count("<calculator>") == 1


@pytest.mark.slow
def test_an_environment_answers_and_the_model_tries_again(tmp_path: Path) -> None:
    form = form_with(environment=f"{ENVIRONMENTS}:HigherLower")
    first, second = rollouts_of(form, "<answer>50</answer><answer>42</answer>", "<answer>1</answer>" * 4)
    assert [(t.source, t.reply) for t in first.turns] == [("environment", "too high")]
    assert first.grade is not None and first.grade.correct and first.text == "<answer>42</answer>"
    assert first.turns[0].request == "<answer>50</answer>"
    # The first answer ended by a stop string, without the end token that the template has there.
    said = tokenizer_with(form).decode(first.completion_ids)
    assert (
        "50</answer><|im_end|>\n<|im_start|>user\ntoo high<|im_end|>\n<|im_start|>assistant\n<answer>42"
        in said
    )
    assert [t.reply for t in second.turns] == ["too low", "too low"]
    assert not any(s for s, i in zip(first.sampled_mask, first.completion_ids, strict=True) if i == 1)
    wrong, right, stubborn = rollouts_of(
        form_with(environment=f"{ENVIRONMENTS}:CorrectYourSum"),
        "12 + 30 = 41 <answer>41</answer>12 + 30 = 42 <answer>42</answer>",
        "12 + 30 = 42 <answer>42</answer>",
        "6*7=41 <answer>41</answer>" * 3,
    )
    assert [t.reply for t in wrong.turns] == ["12 + 30 is not 41. Correct it and answer again."]
    assert wrong.parsed.answer == "42" and right.turns == () and right.parsed.answer == "42"
    assert len(stubborn.turns) == 1 and stubborn.parsed.answer == "41"
    broken = tmp_path / "broken.py"
    broken.write_text(BROKEN)
    (row,) = rollouts_of(form_with(environment=f"{broken}:Broken"), "<answer>1</answer>" * 2)
    assert [(t.reply, t.error) for t in row.turns] == [("LookupError: no board", "LookupError")]


@pytest.mark.slow
def test_sft_imitates_calls_and_not_their_outputs() -> None:
    for form in (form_with(use=["calculator"], format="equals"), form_with(use=["calculator"])):
        tokenizer = tokenizer_with(form)
        problems = story_problems(20, seed=3)
        demos = demonstrations(problems, form, tokenizer)
        rows, _ = tokenize_demonstrations(demos, tokenizer, max_length=None)
        for demo, row, problem in zip(demos, rows, problems, strict=True):
            assert demo.replies
            hidden = [i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label == -100]
            shown = [label for label in row["labels"] if label != -100]
            prompt = tokenizer(demo.prompt)["input_ids"]
            text = "".join(demo.completion[a:b] for a, b in demo.replies)
            assert tokenizer.decode(hidden[len(prompt) :]) == text
            assert shown[-1] == tokenizer.eos_token_id
            # What is taught is what a rollout of the same text is, token by token.
            (rollout,) = rollouts_of(form, "".join(t for t, own in demo.pieces if own))
            assert (
                rollout.completion_ids
                == row["input_ids"][len(prompt) : len(prompt) + len(rollout.completion_ids)]
            )
            assert rollout.parsed.answer == problem.answer
            trace = dataclasses.replace(problem, extra={"prompt": demo.prompt, "response": demo.completion})
            (as_written,) = demonstrations([trace], form, tokenizer, "prompt_response")
            assert as_written.replies == demo.replies


def test_a_model_carries_its_tools_but_no_code(tmp_path: Path) -> None:
    form = form_with(use=["calculator"], format="equals", calls=3)
    tokenizer = tokenizer_with(form)
    attach(tokenizer, Asked(form, 64))
    tokenizer.save_pretrained(tmp_path)
    asked = attached(tmp_path)
    assert asked is not None and asked.prompt_format == form
    file = tmp_path / "own.py"
    file.write_text(OWN)
    for own in (form_with(use=[f"{file}:shout"]), form_with(environment=f"{ENVIRONMENTS}:HigherLower")):
        attach(tokenizer, Asked(own, 64))
        tokenizer.save_pretrained(tmp_path)
        asked = attached(tmp_path)
        assert asked is not None
        with pytest.raises(ConfigError, match=r"code that its settings may not start.*--no-tools"):
            rollouts_of(asked.prompt_format, "a")
    assert dataclasses.replace(form, turns=None).demonstrate("1 + 1 = 2", "2") == form.demonstrate(
        "1 + 1 = 2", "2"
    )


def test_each_setting_of_tools_changes_what_is_asked_or_answered() -> None:
    text = "<calculator>1 + 1</calculator><calculator>123456 * 1</calculator>"
    plain = form_with(use=["calculator"])
    first = rollouts_of(plain, text)[0]
    assert [t.error for t in first.turns] == ["", ""]
    assert rollouts_of(form_with(use=["calculator"], calls=1), text)[0].turns[1].error == "TooManyCalls"
    short = rollouts_of(form_with(use=["calculator"], output_tokens=4), text)[0].text
    mark = len(tokenizer_with(plain)("…", add_special_tokens=False)["input_ids"])
    assert f"<output>{'123456'[: 4 - mark]}…</output>" in short  # the mark of the cut is among the four
    assert form_with(use=["calculator"], instructions=False).system_prompt != plain.system_prompt
    taught = [
        f.demonstrate("1 + 1 = 2", "2") for f in (plain, form_with(use=["calculator"], demonstrations=False))
    ]
    assert "<calculator>1 + 1</calculator><output>2</output>" in taught[0] and "1 + 1 = 2" in taught[1]
    chat = form_with(use=["calculator"], format="chat")
    assert chat.template_kwargs["tools"][0]["function"]["name"] == "calculator"


def test_limits_reach_the_tool() -> None:
    pytest.importorskip("pydantic_monty")
    loop, large = "<python>while True: pass</python>", "<python>len([0] * 4_000_000)</python>"
    quick = form_with(use=["python"], seconds=0.1, memory_mb=16)
    assert [rollouts_of(quick, text)[0].turns[0].error for text in (loop, large)] == [
        "TimeoutError",
        "MemoryError",
    ]
    assert rollouts_of(quick, loop)[0].turns[0].seconds < 1.5
    roomy = form_with(use=["python"], seconds=5, memory_mb=256)
    assert rollouts_of(roomy, large)[0].turns[0].reply == "4000000"


def test_what_neither_calls_nor_answers_can_be_left_out() -> None:
    """``drop_void``: no reward, so no part in the group's mean and no advantage."""
    form = form_with(use=["calculator"])
    rollouts = rollouts_of(
        form, "nothing", "<calculator>1+1</calculator>", "<answer>42</answer>", "<answer>7</answer>"
    )
    groups = [Group(Problem("p", "q", "42"), "q", [1], rollouts)]
    metrics = turn_metrics(groups)
    assert metrics["tools/void_share"] == 0.25 and metrics["tools/called_share"] == 0.25
    assert metrics["tools/failed_share"] == 0 and metrics["tools/refused_share"] == 0
    for drop, totals in ((True, [None, 0.0, 1.0, 0.0]), (False, [0.0, 0.0, 1.0, 0.0])):
        recipe = load_recipe(
            "smoke-cpu", [f"tools={{use: [calculator], drop_void: {str(drop).lower()}}}"]
        ).recipe
        trainer = SimpleNamespace(rewards=build_rewards(["correct"]))
        (tools,) = (part for part in Extensions.of(recipe) if part.name == "tools")
        tools.prepare(None, trainer)  # type: ignore[arg-type]
        assert trainer.rewards.names == ["correct"] and trainer.rewards.weights == [1.0]
        (group,) = trainer.rewards.pay(groups)
        assert [r.reward for r in group.rollouts] == totals
        right = dataclasses.replace(group, rollouts=[group.rollouts[i] for i in (0, 2, 2, 2)])
        assert useful([group, right]) == [True, not drop], "a group is judged without its void rollouts"
        objective = Objective(loss_named("dapo"), advantage_named("per_reward_normalized"), {"correct": 1.0})
        assert bool(advantages_of([right], objective).any()) is not drop
