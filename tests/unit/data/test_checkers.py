"""Problems with many right answers: a checker decides, in rewards, store, regrade and ``data check`` alike."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from algorist.config.load import load_recipe
from algorist.config.own_files import inputs_of
from algorist.config.schema import DatasetSection, EvalSection
from algorist.data import load_problems
from algorist.errors import DataError, MissingExtraError
from algorist.evaluation.run import EvaluationSetting, evaluate
from algorist.extensions.regrade.differences import differences
from algorist.prompts import get_format
from algorist.rewards import build_rewards
from algorist.rollouts.base import Completion, Completions, SamplingParams
from algorist.rollouts.collect import collect
from algorist.runs.begin import hold_folder
from algorist.store.write import RolloutWriter, rows_of
from algorist.types import Problem
from algorist_grader import grade
from algorist_grader.checkers import CHECKERS, read_files_again
from algorist_grader.countdown import value_of
from algorist_grader.matchers import MATCHERS
from algorist_grader.registry import by_user
from tests.conftest import Verb
from tests.tiny import TOKENIZER

MAKE_24 = {"checker": "countdown", "numbers": [4, 6, 3], "target": 24, "exact": False, "problem_id": "p"}


def countdown(split: str = "train", **params: Any) -> list[Problem]:
    return load_problems(DatasetSection(name="countdown", split=split, params={"count": 150, **params}))


def test_countdown_golds_are_right_by_plain_arithmetic() -> None:
    for problem in countdown(numbers=[2, 3, 4, 5]):
        exact = re.sub(r"\d+", r"Fraction(\g<0>)", problem.answer)
        assert eval(exact, {"Fraction": Fraction}) == problem.extra["target"] == value_of(problem.answer)[0]
        assert sorted(map(int, re.findall(r"\d+", problem.answer))) == problem.extra["numbers"]
        assert grade(problem.answer, "", problem=problem.columns()).reason == "checked"
    drawn = [
        {(*p.extra["numbers"], p.extra["target"]) for p in countdown(split)} for split in ("train", "test")
    ]
    assert not drawn[0] & drawn[1]


def test_a_careless_demonstration_ends_at_a_wrong_try() -> None:
    problems = countdown(careless=1.0, tries=3)
    last = [p.extra["demonstrated_answer"] for p in problems]
    wrong = [not grade(a, "", problem=p.columns()).correct for a, p in zip(last, problems, strict=True)]
    assert 0.5 < sum(wrong) / len(wrong) < 1  # a demonstration without a wrong try ends right
    assert all(p.solution.splitlines()[-1].startswith(f"{a} = ") for a, p in zip(last, problems, strict=True))


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("4 * 6", True), ("(3 - (-3))*4", False), ("6*4*3/3", False), ("$4 \\times 6$", True), ("6·4 = 24", True),
        ("6*4 = 25", False), ("24", False), ("4*6*1", False), ("46-22", False), ("4**2+6+3", False), ("6//1*4", False),
        ("((((", False), ("4*6)", False), ("__import__('os')", False), ("4*6" + " " * 300 + "+0", False), ("4*6/0", False),
        ("(" * 99 + "4*6" + ")" * 99, False), ("04*6", False), ("-(-4)*6", True), ("4.0*6", False),
    ],
)  # fmt: skip
def test_countdown_reads_expressions_only(answer: str, right: bool) -> None:
    assert grade(answer, "4*6", problem=MAKE_24).correct is right


def test_exact_wants_every_number() -> None:
    assert not grade("4*6", "", problem={**MAKE_24, "exact": True}).correct
    assert grade("4*6", "", problem={**MAKE_24, "numbers": [6, 4], "exact": True}).correct
    # Numbers of a row have a bearable size: 10^(10^9) would be computed for ever.
    for row in ({"target": "1e100000"}, {"numbers": ["4", "6", "1e100000"]}, {"target": None}):
        assert grade("4*6", "", problem=MAKE_24 | row).reason == "crashed", row


class Scripted:
    """Writes one text per completion."""

    name = "scripted"

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def generate(self, prompts: Any, group_size: int, params: SamplingParams) -> Completions:
        return [[Completion(TOKENIZER(t)["input_ids"], None, "stop") for t in self.texts] for _ in prompts]


def test_reward_grade_and_stored_row_agree() -> None:
    form = get_format("question_only")
    problem = Problem("p", "q", "4*6", extra={"numbers": [4, 6], "target": 24}, checker="countdown")
    texts = ["\\boxed{6*4}", "\\boxed{24}", "none"]
    (group,) = collect(
        Scripted(*texts),
        TOKENIZER,
        [problem],
        form,
        SamplingParams(),
        3,
        rewards=build_rewards(["correct"], form),
    )
    rows = rows_of(group)
    assert [row["reason"] for row in rows] == ["checked", "different", "no_answer"]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.0] and {row["checker"] for row in rows} == {
        "countdown"
    }


@pytest.mark.parametrize("checked", [True, False])
def test_a_completion_is_asked_about_once(
    tmp_path: Path, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two verdicts could be another one: that of a judge, or of a grader that ran into its limits before."""
    calls, file = tmp_path / "calls.txt", tmp_path / "mine.py"
    file.write_text(
        "def check(problem, answer):\n"
        f"    with open({str(calls)!r}, 'a+') as calls:\n"
        "        calls.write('.')\n        calls.seek(0)\n        return len(calls.read()) % 2 == 1\n"
    )
    verdicts = iter([(False, "timeout"), (True, "equal_number"), (False, "crashed")])
    late = dataclasses.replace(MATCHERS.get("numeric"), judge=lambda *_: next(verdicts))
    monkeypatch.setitem(MATCHERS._entries, "late", late)
    form, answers = get_format("question_only"), ["24", "25", "7"]
    problem = Problem("p", "q", "4*6", checker=f"{file}:check" if checked else "")
    engine = Scripted(*(f"\\boxed{{{answer}}}" for answer in answers))
    rewards = build_rewards(["correct", {"name": "correct", "weight": 0.5}], form, matcher="late")
    (group,) = collect(
        engine, TOKENIZER, [problem], form, SamplingParams(), 3, rewards=rewards, matcher="late"
    )
    rows = rows_of(group)
    assert [row["correct"] for row in rows] == ([True, False, True] if checked else [False, True, False])
    assert [1.5 * row["correct"] for row in rows] == [row["reward"] for row in rows]
    assert not rewards.failures["correct"] and (not checked or calls.read_text() == "...")


def test_lenient_accuracy_asks_the_checker_about_the_last_number() -> None:
    form = get_format("reasoning_answer")
    problem = Problem("p", "q", "4+5", extra={"numbers": [9], "target": 9}, checker="countdown")
    setting = EvaluationSetting.from_section(EvalSection(samples=0), max_tokens=8, matcher="numeric", seed=0)
    for text, right in (("I think it is 9", True), ("I think it is 8", False), ("no number", False)):
        (row,) = evaluate(Scripted(text), TOKENIZER, [problem], form, setting)
        assert (row["correct"], row["lenient"]) == (False, right), text


def test_a_stored_run_is_graded_again_by_its_checker(tmp_path: Path) -> None:
    row = {"question": "make 24", "answer": "4*6", "numbers": [4, 6], "target": 24, "checker": "countdown"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    changes = [
        f"data.train={{name: local, path: {tmp_path / 'rows.jsonl'}}}",
        "prompt.format=question_only",
        "rewards=[correct]",
    ]
    recipe = load_recipe("smoke-cpu", [*changes, f"output_dir={tmp_path}", "run_name=r"]).recipe
    form = get_format("question_only")
    engine = Scripted("\\boxed{6*4}", "\\boxed{24}")  # 24 equals the gold answer, but does not make it
    rewards = build_rewards(["correct"], form)
    problems = load_problems(recipe.data.train)
    (group,) = collect(engine, TOKENIZER, problems, form, SamplingParams(), 2, rewards=rewards)
    held = hold_folder(recipe, inputs_of(recipe), resume=False)
    with held as folder, RolloutWriter(folder.rollouts) as store:
        store.write([row | {"stage": "grpo", "step": 0} for row in rows_of(group)])
    found = differences(folder.path, None)
    assert (found["rollouts"], found["moves"], found["rewards_changed"]) == (2, {}, 0)
    assert found["accuracy_before"] == found["accuracy_after"] == 0.5


def test_rows_of_a_dataset_may_not_name_code(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')\n")
    row = {"question": "q", "answer": "1", "checker": f"{tmp_path / 'own.py'}:check"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(
        DataError, match=r"names code to run, checker '.*own\.py:check'.*data\.….checker=FILE"
    ):
        load_problems(DatasetSection(name="local", path=str(tmp_path / "rows.jsonl")))


def test_rows_name_their_checker_and_files_hold_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Verb
) -> None:
    """The door of a user's checker: right, raising, returning a number, missing; each in words before anything runs."""
    monkeypatch.chdir(tmp_path)
    own = "def even(problem, answer):\n    return int(answer) % 2 == problem['rest']\n\ndef half(problem, answer):\n    return 0.5\n"
    (tmp_path / "own.py").write_text(own)
    rows = [
        {"question": "an even number", "answer": "2", "rest": 0},
        {"question": "make 10", "answer": "5*2", "nums": [2, 5], "target": 10, "checker": "countdown"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "even.jsonl").write_text(json.dumps(rows[0]))
    (tmp_path / "bad.jsonl").write_text(json.dumps(rows[1] | {"nums": None}))

    assert verb("data", "check", "rows.jsonl,split=train")[0] == 0
    code, out, _ = verb("data", "check", "even.jsonl,checker=own.py:even")
    assert code == 0 and "1 checked" in out
    (problem,) = load_problems(DatasetSection(name="local", path="even.jsonl", checker="own.py:even"))
    graded = [grade(answer, "2", problem=problem.columns()) for answer in ("8", "7", "many")]
    assert [g.reason for g in graded] == ["checked", "different", "crashed"]
    for data, said in {
        "even.jsonl,checker=own.py:half": "TypeError: it returned 0.5; expected True or False",
        "even.jsonl,checker=own.py:evn": "has no function 'evn'. Did you mean 'even'?",
        "even.jsonl,checker=owm.py:even": "Did you mean 'own.py'?",
        "even.jsonl,checker=countdwn": "unknown checker 'countdwn'. Did you mean 'countdown'?",
        "bad.jsonl": "checker 'countdown' fails on the gold answer '5*2' of problem",
    }.items():
        code, _, err = verb("data", "check", data + ("" if "," in data else ",split=train"))
        assert code == 2 and said in " ".join(err.split()), err


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'algorist\[reasoning-gym\]'"):
        load_problems(DatasetSection(name="reasoning_gym", params={"generator": "chain_sum"}))


def gym(generator: str, split: str = "train", **config: Any) -> list[Problem]:
    params = {"generator": generator, "count": 20, "config": config}
    return load_problems(DatasetSection(name="reasoning_gym", split=split, params=params))


@pytest.mark.long
@pytest.mark.slow
def test_reasoning_gym_grades_by_its_own_scorers(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    for generator in ("chain_sum", "arc_agi", "jugs"):
        problems = gym(generator)
        assert all(grade(p.answer, p.answer, problem=p.columns()).correct for p in problems)
        assert not {p.question for p in problems} & {p.question for p in gym(generator, "test")}
    problem = gym("countdown", min_numbers=3, max_numbers=3)[0]
    assert grade(f"0 + {problem.answer}", "", problem=problem.columns()).reason == "different"
    assert grade(f"({problem.answer})", "", problem=problem.columns()).reason == "checked"
    stolen = tmp_path / "stolen"
    for attack in (f'open("{stolen}", "w")', f'__import__("os").system("touch {stolen}")', "9**9**9**9"):
        assert grade(attack, "", problem=problem.columns()).reason in ("different", "timeout")
    assert not stolen.exists()
    for params, said in {
        "chain_sm": "Did you mean 'chain_sum'",
        "chain_sum": "has no setting 'max_term'. Did you mean 'max_terms'",
    }.items():
        with pytest.raises(DataError, match=re.escape(said)):
            gym(params, max_term=3)
    with pytest.raises(DataError, match="refuses its settings"):
        gym("chain_sum", min_terms=9, max_terms=3)
    with pytest.raises(DataError, match="distinct problems of"):
        gym(
            "chain_sum", min_digits=1, max_digits=1, max_terms=2, min_terms=2, allow_negation=False
        ) and load_problems(
            DatasetSection(name="reasoning_gym", params={"generator": "coin_flip", "count": 500})
        )


def test_a_checkers_file_may_hold_dataclasses_with_deferred_annotations(tmp_path: Path) -> None:
    """``dataclasses`` looks its module up by name, which must be known while the file runs."""
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import KW_ONLY, dataclass\n"
        "@dataclass\nclass Sum:\n    _: KW_ONLY\n    total: int\n"
        "def check(problem, answer):\n    return Sum(total=int(problem['question'])).total == int(answer)\n",
        encoding="utf-8",
    )
    found = grade("7", "", problem={"question": "7", "checker": f"{tmp_path / 'mine.py'}:check"})
    assert found.correct and found.reason == "checked"


def test_an_edited_checker_decides_from_then_on(tmp_path: Path) -> None:
    """A notebook was graded by what the file said when it was first read."""
    file, name = tmp_path / "mine.py", f"{tmp_path / 'mine.py'}:check"
    for n, says in enumerate((True, False, True)):
        file.write_text(f"def check(problem, answer):\n    return {says}\n")
        os.utime(file, ns=(n, 10**18 + n))
        if n:  # not in the middle of a run
            assert grade("7", "7", problem={"checker": name}).correct is not says
        read_files_again()
        assert grade("7", "7", problem={"checker": name}).correct is says
    with by_user():
        for says in (True, False):
            CHECKERS.register("of_a_plugin")(lambda problem, answer, says=says: says)
            assert grade("7", "7", problem={"checker": "of_a_plugin"}).correct is says
