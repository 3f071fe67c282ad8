"""Rewards written for other systems run as they are: their columns, their chat messages, their tags, their golds; or they are refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from algorist import trl_reward
from algorist.config.load import load_recipe
from algorist.errors import ConfigError
from algorist.evaluation.artifact import artifact_names, read_artifact
from algorist.models.tiny import train_tokenizer
from algorist.rewards import build_rewards
from algorist.runs.draft import Draft
from algorist.runs.paid import fitting_and_paid
from algorist.runs.pipeline import run_recipe
from algorist.runs.plan import make_plan
from algorist.store.read import query
from algorist.store.run_log import Quiet
from algorist.types import Group, Problem, Rollout
from tests.conftest import Cli

THEIRS = '''
import re

def s0(*, prompts, completions, reference_answer, **kwargs):
    """OneShotGRPO: keyword-only, gold under reference_answer; completions of any form."""
    assert len(prompts) == len(completions) == len(kwargs["reference_solution"])
    return [float(str(a) in str(c)) for c, a in zip(completions, reference_answer)]

def s1(prompts, completions, answer, **kwargs):
    """The SFT-then-GRPO notebook, the GSM8K gist: chat messages."""
    question = prompts[0][-1]["content"]
    assert question and prompts[0][-1]["role"] == "user"
    return [float(a in c[0]["content"]) for c, a in zip(completions, answer)]

def s3(response, ground_truth, fast=True):
    """CS336: a response, a mapping of three rewards."""
    right = float(ground_truth in response)
    return {"format_reward": 1.0, "answer_reward": right, "reward": right}

def s4(completions, solution, **kwargs):
    """open-r1: the gold answer under solution."""
    contents = [completion[0]["content"] for completion in completions]
    return [float(s in c) for c, s in zip(contents, solution)]

def s4_tutorial(completions, **kwargs):
    return [0.5 if re.search("[0-9]", c[-1].get("content")) else 0.0 for c in completions]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    """verl's compute_score."""
    assert extra_info["question"]
    return {"score": float(ground_truth in solution_str)}

def texts(completions, **kwargs):
    return [len(c) / 100 for c in completions]

def never(completions, difficulty, **kwargs):
    return [1.0 for _ in completions]

def broken(completion, *, gold):
    return undefined_name

def at_times(completion, *, gold):
    return 1.0 / ("8." not in completion)

for function in (s0, s1, s3, s4, verl):
    function.low = -1.0  # the floor
'''
ORIGINS = ["s0", "s1", "s3", "s4", "verl"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.py"
    path.write_text(THEIRS)
    return path


def groups(*texts: str) -> list[Group]:
    problem = Problem("p", "What is 3 * 4?", "12")
    rewards = build_rewards(["correct"])
    made = [Rollout([1], text, None, False, rewards[0].form.parse(text)) for text in texts]
    return [Group(problem, "What is 3 * 4?", [1], made)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ORIGINS, "s4_tutorial", "texts"])
@pytest.mark.parametrize("where", ["of a file", "of this process"])
def test_a_function_of_each_origin_is_paid_as_there(file: Path, name: str, where: str) -> None:
    functions: dict[str, Any] = {}
    exec(compile(THEIRS, "theirs", "exec"), functions)
    rewards = build_rewards([f"{file}:{name}" if where == "of a file" else functions[name]])
    paid = [r.reward for r in rewards.pay(groups("it is 12", "it is 13", ""))[0].rollouts]
    expected = {"s4_tutorial": [0.5, 0.5, 0.0], "texts": [0.08, 0.08, 0.0]}.get(name, [1.0, 0.0, 0.0])
    assert paid == expected and not any(rewards.failures.values())
    assert rewards.explain("it is 12", "12", question="What is 3 * 4?").total == expected[0]


def test_a_batch_that_begins_with_nothing_does_not_decide_the_form(file: Path) -> None:
    for name, expected in (("s1", [0.0, 1.0]), ("texts", [0.0, 0.08])):
        rewards = build_rewards([f"{file}:{name}"])
        assert [r.reward for r in rewards.pay(groups("", "it is 12"))[0].rollouts] == expected


@pytest.mark.slow
def test_they_earn_in_a_run_what_the_evaluation_measures(file: Path, tmp_path: Path) -> None:
    """On the rollouts of a run: the same completions, no floor, nothing counted as failed."""
    rewards = ", ".join(f'"{file}:{name}"' for name in [*ORIGINS, "texts"])
    settings = ["threads=1", "sft.enabled=false", "grpo.max_steps=1", f"rewards=[{rewards}]"]
    run = run_recipe(load_recipe("smoke-cpu", [*settings, f"output_dir={tmp_path}"]).recipe, display=Quiet())
    rows = query(run.folder.path, "SELECT completion, gold, rewards FROM rollouts")
    assert rows
    for row in rows:
        paid = row["rewards"] if isinstance(row["rewards"], dict) else json.loads(row["rewards"])
        assert paid["texts"] == pytest.approx(len(row["completion"]) / 100)
        assert {paid[name] for name in ORIGINS} == {float(row["gold"] in row["completion"])}
    (name,) = artifact_names(run.folder.evaluations)
    assert read_artifact(run.folder.evaluations, name).samples


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), [("never", "'difficulty'"), ("broken", "undefined_name")])
def test_what_can_never_pay_is_refused_before_the_run(
    file: Path, tmp_path: Path, name: str, said: str
) -> None:
    recipe = load_recipe("smoke-cpu", [f'rewards=["{file}:{name}"]', f"output_dir={tmp_path}"]).recipe
    with pytest.raises(ConfigError, match=rf"reward '{name}' fails on every completion .*{said}") as refused:
        make_plan(Draft.of(recipe))
    names = ("reference_answer", "question") if name == "never" else ("gold", "ground_truth")
    assert all(one in str(refused.value) for one in names)
    assert not (tmp_path / "smoke-cpu").exists()


def test_what_fails_at_times_is_data(file: Path, tmp_path: Path) -> None:
    recipe = load_recipe("smoke-cpu", [f'rewards=["{file}:at_times"]', f"output_dir={tmp_path}"]).recipe
    assert make_plan(Draft.of(recipe)).recipe == recipe


@pytest.mark.slow
@pytest.mark.parametrize("name", ORIGINS)
def test_explain_says_what_a_run_would(file: Path, name: str, call: Cli) -> None:
    command = ("rewards", "explain", "--completion", "it is 12", "--answer", "12", "--row", "question=3 * 4?")
    done = call(*command, f'rewards=["{file}:{name}"]')
    assert done.returncode == 0 and "1.0" in done.stdout, done.stderr
    done = call(*command, f'rewards=["{file}:never"]')
    assert done.returncode == 1 and "difficulty" in done.stderr


WORKING = "6 * 7\n<end_working_out>\n<SOLUTION>\n42\n</SOLUTION>"
THINKING = "<think>\n6 * 7\n</think>\n<answer>\n42\n</answer>"
REASONING = "<reasoning>\n6 * 7\n</reasoning>\n<answer>\n42\n</answer>\n"


@pytest.mark.parametrize(
    ("names", "completion", "total"),
    [
        (["check_answer"], WORKING, 5.0),
        (
            ["match_format_exactly", "match_format_approximately", "check_answer", "check_numbers"],
            WORKING,
            12.5,
        ),
        (["format"], THINKING, 1.0),
        (["think_answer_format"], THINKING, 1.0),
        (["tag_count"], THINKING, 1.0),
        (["accuracy", "format", "correct"], THINKING, 3.0),
        (["tag_fraction", "well_formed"], REASONING, 2.0),
        (["xmlcount", "soft_format", "strict_format", "int", "correctness"], REASONING, 4.0),
    ],
)
def test_rewards_by_name_read_their_own_tags(names: list[str], completion: str, total: float) -> None:
    assert build_rewards(names).explain(completion, "42").total == pytest.approx(total)
    assert (
        sum(
            trl_reward(n)(completions=[completion], answer=["42"])[0] or 0.0
            for n in names
            if n not in ("correct", "well_formed")
        )
        > 0
    )


def test_rewards_of_different_tags_are_named(caplog: pytest.LogCaptureFixture) -> None:
    build_rewards(["format", "check_answer"], "think_answer")
    assert not caplog.records
    build_rewards(["format", "check_answer"])
    assert "format, check_answer were published for different tags" in caplog.text


@pytest.mark.parametrize(
    "gold",
    [
        "42",
        "#### 42",
        "6 * 7 = <<6*7=42>>42 pens.\n#### 42",
        r"We multiply: $6 \cdot 7 = \boxed{42}$.",
        r"$\boxed{42}$",
    ],
)
@pytest.mark.parametrize("name", ["correct", "accuracy", "correctness_numeric", "correctness", "r1_zero"])
def test_worked_solutions_are_golds(name: str, gold: str) -> None:
    text = (
        "6 * 7 </think> <answer>{}</answer>"
        if name == "r1_zero"
        else "<think>\n6 * 7\n</think>\n<answer>\n{}\n</answer>"
    )
    one = trl_reward(name)
    right, wrong = one(completions=[text.format(42), text.format(24)], answer=[gold, gold])
    assert right is not None and wrong is not None and right > wrong


def test_of_several_turns_the_assistants_last_one_counts() -> None:
    turns = [
        {"role": "assistant", "content": "<tool_call>6 * 7</tool_call>", "tool_calls": []},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": THINKING},
    ]
    assert trl_reward("accuracy")(completions=[turns, turns[:2]], answer=["42", "42"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("gold", "paid", "unpaid"),
    [
        ("3x", ["3x", "3*x", "2x+x", r"3\cdot x"], ["3", "3y", "4x", "3x^2"]),
        ("162x^4", ["162x^4", "162x^{4}"], ["162", "162x^3", "162x"]),
        ("162x^{4}", ["162x^4", "162x^{4}"], ["162"]),
        ("10", ["10", "10 cm", r"10\text{ cm}^2"], ["5C2", r"\binom{5}{2}", "10x", "20/2"]),
        (r"\frac12", [r"\frac12", r"\frac{1}{2}", "1/2"], [r"\frac24", r"\frac{2}{4}"]),
    ],
)
def test_the_fast_reward_takes_no_letter_for_a_unit(gold: str, paid: list[str], unpaid: list[str]) -> None:
    one = trl_reward("r1_zero")
    for values, answers in ((1.0, paid), (0.0, unpaid)):
        texts = [f"so </think> <answer> {answer} </answer>" for answer in answers]
        assert one(completions=texts, answer=[gold] * len(texts)) == [values] * len(texts), answers


@pytest.mark.parametrize("matcher", ["latex_verify", "symbolic", "numeric"])
def test_a_gold_that_nobody_can_read_pays_the_neutral_value(matcher: str) -> None:
    """The recipe r1-zero-numina has the matcher latex_verify."""
    one = trl_reward("accuracy", matcher=matcher)
    golds = [r"\frac{", "{{", "..", "see above", "", None, "4", "5"]
    assert one(completions=["<answer>4</answer>"] * 8, answer=golds) == [0.5] * 6 + [1.0, 0.0]
    assert one.failures == 0


def test_correct_only_keeps_what_the_reward_pays(tmp_path: Path, call: Cli) -> None:
    """The grader finds each right; r1_zero pays the first two."""
    said = [
        (r"so </think> <answer> 4 </answer>", "4"),
        (r"so </think> <answer> 1/2 </answer>", "1/2"),
        (r"so </think> <answer> 8/2 </answer>", "4"),
        (r"so </think> <answer> \frac{2}{4} </answer>", r"\frac{1}{2}"),
        ("so </think>\n<answer> 4 </answer>", "4"),
    ]
    rows = [
        {"prompt": f"User: Question {n}\nAssistant: <think>", "response": text, "ground_truth": gold}
        for n, (text, gold) in enumerate(said)
    ]
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        "data.sft.correct_only=true",
        f"data.train.path={path}",
        "model.name=tiny",
        "eval.enabled=false",
    ]
    for source, count in (("prompt_response", 2), ("problems", 3)):
        recipe = load_recipe("math-sft", [*settings, f"sft.source={source}", f"output_dir={tmp_path}"]).recipe
        plan = make_plan(Draft.of(recipe))
        assert len(plan.problems.sft) == count
        assert any(
            f"{5 - count} of 5 right demonstrations are paid nothing by r1_zero" in r for r in plan.remarks
        )
        plan.recipe.data.sft.max_prompt_tokens = 500  # type: ignore[union-attr]
        args = plan.rewards, plan.form, train_tokenizer(["abc"])
        fitting = fitting_and_paid(plan.recipe, plan.problems.sft, *args)
        assert len(fitting) == count, "a filter by length brings none of them back"
        rows[0]["prompt"] = f"User: {'Question ' * 60}\nAssistant: <think>"
        longer = tmp_path / f"{source}.jsonl"
        longer.write_text("".join(json.dumps(row) + "\n" for row in rows))
        plan.recipe.data.sft = plan.recipe.data.sft.model_copy(update={"path": str(longer), "limit": 2})  # type: ignore[union-attr]
        (second,) = fitting_and_paid(plan.recipe, plan.problems.sft, *args)
        assert second.answer == "1/2", "the first is too long, and the third, now within the limit, not paid"
    graded = call("grade", "--file", str(path), "--format", "r1_zero", "--json")
    assert [row["correct"] for row in json.loads(graded.stdout)["verdicts"]] == [True] * 5, graded.stderr
