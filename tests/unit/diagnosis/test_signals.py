"""Causes on signals made by hand, where no run is needed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from algorist.diagnosis.course import odd_data
from algorist.diagnosis.demonstrations import cut_solutions
from algorist.diagnosis.diagnose import find_causes, not_explained
from algorist.diagnosis.rule import Facts
from algorist.diagnosis.rules import all_rules
from algorist.diagnosis.settings import Settings
from algorist.diagnosis.signals import Signals, same_number
from algorist.types import Problem


def test_a_reward_without_any_value_does_not_stop_the_diagnosis() -> None:
    """The reward rises while answers become wrong; a second reward is never a number."""
    signals = Signals()
    for step in range(12):
        right = step < 6
        rows = [
            {
                "step": step, "group": group, "problem_id": f"p{group}", "completion": "text", "completion_tokens": 4,
                "reward": float(not right) + 0.01 * row, "correct": right, "reason": "equal" if right else "different",
            }
            for group in range(8)
            for row in range(4)
        ]  # fmt: skip
        signals.add_rollouts(rows)
        signals.add_metrics(
            "grpo", step, {"rewards/own/mean": float(step), "rewards/empty/mean": float("nan")}
        )
    finding = all_rules()["reward_hacking"].look(Facts(signals.settings, signals=signals))
    assert finding is not None
    assert "single rewards, first and last step: own 0 → 11" in finding.evidence
    assert len(finding.samples) == 3 and "[read nothing, gold None, different, reward" in finding.samples[0]


def course(accuracy: list[int], *, size: int = 4, metrics: dict[str, float] | None = None) -> Signals:
    """Make up a run with so many right completions of four in each of 16 groups of a step, whose reward hardly changes."""
    signals = Signals()
    for step, right in enumerate(accuracy):
        rows = [
            {
                "step": step, "group": group, "problem_id": f"p{group}", "completion": f"text {row}", "completion_tokens": 4,
                "reward": 0.1 * row + 0.2 * ((group * 7 + step * 3) % 5) + 0.002 * step, "correct": (group + row) % 4 < right, "reason": "different",
            }
            for group in range(16 * 4 // size)
            for row in range(size)
        ]  # fmt: skip
        signals.add_rollouts(rows)
        signals.add_metrics("grpo", step, metrics or {})
    return signals


@pytest.mark.parametrize("size", [4, 1])
def test_a_fall_of_the_accuracy_is_a_finding_whatever_the_reward_does(size: int) -> None:
    """The reward rises a little; advantages that do not agree with correctness leave the learning rate out of it."""
    falling = course([2] * 10 + [0] * 10, size=size, metrics={"ledger/correct/advantage": 0.05})
    assert [finding.name for finding in find_causes(falling)] == ["accuracy_falls"]
    unknown = course([2] * 10 + [0] * 10, size=size)
    assert [finding.name for finding in find_causes(unknown)] == ["learning_rate_too_large"]


def test_a_run_that_stands_still_is_not_explained() -> None:
    assert not_explained(course([2] * 12)) == "the accuracy did not rise: 0.50 → 0.50 (+0.0 SE)"
    assert not_explained(course([1] * 6 + [3] * 6)) == ""
    assert not_explained(course([4] * 12)) == "", "nothing is left to learn"
    assert find_causes(course([2] * 12)) == []


def test_what_is_not_explained_names_the_users_own_code() -> None:
    still = course([2] * 12)
    still.settings = Settings(
        {
            "grpo": {"loss": {"name": "own.py:loss"}, "beta": 0.0},
            "plugins": ["more.py"],
            "rewards": ["correct", "r.py:paid"],
        }
    )
    expected = "leave out first: grpo.loss.name=own.py:loss, plugins=more.py, rewards=r.py:paid"
    assert not_explained(still).endswith(expected)


@pytest.mark.parametrize(
    ("after", "step", "named"), [(0.24, 1e-3, True), (0.24, 1e-8, False), (0.60, 1e-3, False)]
)
def test_training_problems_that_teach_nothing_are_of_another_kind(
    after: float, step: float, named: bool, tmp_path: Path
) -> None:
    """Neither accuracy moves, far apart, though the weights do; the run was done without its SFT."""
    signals = course([2] * 12, metrics={"ledger/step/length": step})
    signals.run, signals.settings = tmp_path, Settings({"sft": {"enabled": True}})
    (tmp_path / "eval").mkdir()
    for name, value in (("base", 0.24), ("grpo", after)):
        metrics = {"greedy_accuracy": {"value": value, "n": 250}}
        (tmp_path / "eval" / f"{name}.json").write_text(json.dumps({"metrics": metrics}))
    facts = Facts(signals.settings, signals=signals)
    assert bool(facts.get("held_out_apart")) == named
    assert facts.get("held_out_before") == pytest.approx(0.24)


def test_cut_solutions_need_whole_ones_beside_them() -> None:
    def solved(texts: list[str]) -> list[Problem]:
        return [Problem(str(n), f"{n}?", text.split()[-1], solution=text) for n, text in enumerate(texts)]

    short = [f"{n} + 1 = {n + 1}" for n in range(10, 50)]
    long = solved([f"{n} + 1 = {n + 1}, and then we add {n} once more: {2 * n + 1}" for n in range(10, 50)])
    cut = [replace(p, solution=p.solution[:24]) for p in long]
    assert cut_solutions(solved(short) + cut) is not None
    for whole in (solved(short), solved(short) + long, cut):
        assert cut_solutions(whole) is None


def test_questions_may_state_their_answer_in_front_or_after_a_sign() -> None:
    rows = (
        [(f"[bin {n}] How many?", str(n)) for n in range(30)],
        [(f"How many? (No. 7-{n})", str(n)) for n in range(30)],
    )
    for stated in rows:
        assert "stated_answers" in odd_data([Problem(str(i), q, a) for i, (q, a) in enumerate(stated)])
    other = [Problem(str(n), f"[bin {n}] How many are {n} + 1?", str(n + 1)) for n in range(30)]
    assert "stated_answers" not in odd_data(other)


def test_the_number_of_the_gold_answer_is_seen_in_whatever_is_around_it() -> None:
    assert same_number("12", "12 km") and same_number("1,200 apples", "1200") and same_number("3.50", "3.5")
    assert not same_number("12 of 13", "12") and not same_number(None, "12") and not same_number("x", "x")


def test_questions_of_another_column_are_seen() -> None:
    rows = [{"asked": f"{n} + 1 = ?", "topic": "sums", "code": f"q{n}"} for n in range(40)]

    def problems(column: str) -> list[Problem]:
        return [Problem(str(n), row[column], str(n + 1), extra=row) for n, row in enumerate(rows)]

    assert odd_data(problems("asked")) == {}
    assert "40 of 40 problems" in odd_data(problems("topic"))["odd_questions"]
    assert "the column asked asks" in odd_data(problems("code"))["odd_questions"]
    answers = [Problem(str(n), str(n), str(n)) for n in range(9)]
    assert "the questions are the gold answers" in odd_data(answers)["odd_questions"]
