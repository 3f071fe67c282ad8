"""``algorist rewards audit``: defects planted in published rewards are named, the rewards as published are not accused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from algorist.cli.grade_command import rewards_app
from algorist.preflight.reward_audit import audit_rewards
from algorist.prompts import get_format
from algorist.rewards import build_rewards
from algorist.types import Problem
from tests.marks import first

SOURCE = Path(__file__).parents[1] / "data" / "published_rewards.py"

DEFECTS = [
    # function, text replaced, its replacement, the rules that name it
    ("accuracy", "float(value is not None and value == number(gold))", "-float(value == number(gold))", {"inverted"}),
    ("accuracy", 'return blocks[-1] if blocks else ""', 'return (re.findall(r"\\d+", text) or [""])[-1]', {"pays_cut", "pays_unfinished_thinking"}),
    ("accuracy", "zip(completions, answer)", "zip(completions, answer[::-1])", {"order", "gold_unpaid"}),
    ("accuracy", "value == number(gold)", "abs(value - (number(gold) or 0)) <= 1", {"pays_near_miss"}),
    ("correctness", "plain(last_answer(text)) == plain(gold)", "plain(gold) in text", {"pays_near_miss", "pays_unfinished_thinking"}),
    ("correctness", "plain(last_answer(text)) == plain(gold)", "plain(gold) in last_answer(text)", {"pays_list_of_guesses", "pays_near_miss"}),
    ("correctness", "plain(last_answer(text)) == plain(gold)", "last_answer(text) == gold", {"rewritten_unpaid"}),
    ("correctness", "2.0 if", "2.0 if not last_answer(text) or", {"pays_empty", "pays_tags_only"}),
    ("compute_score", "number(last_answer(solution_str))", "float(last_answer(solution_str))", {"fails"}),
    ("compute_score", "value == number(ground_truth)", 'value == number(ground_truth.partition("####")[2])', {"constant", "gold_unpaid"}),
    ("compute_score", "value is not None and value == number(ground_truth)", "number(ground_truth) is not None", {"constant"}),
    ("strict_format", "<reasoning>\\n.*?\\n</reasoning>", "<think>\\n.*?\\n</think>", {"constant"}),
    ("strict_format", "text in completions", "text in map(str.strip, completions[::-1])", {"order"}),
    ("tag_count", "if text.count(tag) == 1", "if text.count(tag) == 0", {"pays_no_answer"}),
    ("tag_count", "sum(0.25", "__import__(\"random\").random() + sum(0.25", {"random"}),
    ("think_format", "1.0 if re.match(pattern, text, re.S) else 0.0", "0.0 if re.match(pattern, text, re.S) else 1.0", {"pays_no_answer"}),
    ("steps", "/ 3", "/ 0 if not text else len(marks) / 3", {"fails"}),
    ("cosine", "low, high = (0.5, 1.0) if right else (-0.5, -1.0)", "low, high = (0.5, 1.0) if not right else (-0.5, -1.0)", {"inverted"}),
    ("repetition", "-(1 - len", "(1 - len", {"pays_no_answer"}),
    ("repetition", "if grams else 0.0", "", {"fails"}),
    ("overlong", "-min(max(", "min(max(", {"pays_no_answer", "length"}),
]  # fmt: skip
READS_UNFINISHED = {"pays_unfinished_thinking"}
PUBLISHED: dict[str, set[str]] = {
    "accuracy": READS_UNFINISHED, "correctness": READS_UNFINISHED | {"rewritten_unpaid"}, "compute_score": READS_UNFINISHED, "cosine": READS_UNFINISHED,
    "strict_format": set(), "tag_count": set(), "think_format": set(), "steps": set(), "repetition": set(), "overlong": set(),
}  # fmt: skip
"""What is true of them as they are: whoever takes the last answer block pays one within thinking that never ends, and the gist compares texts."""


def audit(*words: str) -> dict[str, Any]:
    made = CliRunner().invoke(rewards_app, ["audit", *words, "--json"])
    assert made.stdout.startswith("{"), made.output
    return json.loads(made.stdout)


def rules(result: dict[str, Any], level: str = "fault") -> set[str]:
    return {row["name"] for row in result["findings"] if row["level"] == level}


@pytest.mark.slow
@pytest.mark.parametrize("name", first(3, PUBLISHED))
def test_a_published_reward_is_not_accused(name: str) -> None:
    assert rules(audit(f"{SOURCE}:{name}", "--problems", "12")) == PUBLISHED[name]


def test_golds_that_are_worked_solutions_and_tags_of_another_format_are_named() -> None:
    golds = [Problem(str(n), f"What is {n} + 3?", f"{n} + 3 = {n + 3}\n#### {n + 3}") for n in range(12)]
    made = audit_rewards(build_rewards(["correct"]), golds, get_format("reasoning_answer"))
    assert {f.name for f in made.findings if f.level == "fault"} == {"final_answer_unpaid"}
    plain = [Problem(str(n), f"What is {n} + 3?", str(n + 3)) for n in range(12)]
    made = audit_rewards(build_rewards(["tag_fraction"]), plain, get_format("think_answer"))
    assert {f.name for f in made.findings} == {"never_full"}


def test_a_sum_in_which_correct_is_drowned_is_named() -> None:
    result = audit(
        "--problems", "8", "rewards=[{name: correct, weight: 0.02}, {name: tag_fraction, weight: 1}]"
    )
    assert rules(result) == {"no_answer_counts"}
    assert rules(audit("--problems", "8")) == set()


@pytest.mark.long
@pytest.mark.slow
def test_planted_defects_are_named(tmp_path: Path) -> None:
    missed = []
    for number, (name, before, after, expected) in enumerate(DEFECTS):
        text = SOURCE.read_text(encoding="utf-8")
        assert before in text, (name, before)
        file = tmp_path / f"planted{number}.py"
        start = text.index(f"def {name}(") if before in text[text.index(f"def {name}(") :] else 0
        file.write_text(text[:start] + text[start:].replace(before, after, 1), encoding="utf-8")
        result = audit(f"{file}:{name}", "--problems", "12")
        if not (rules(result) | rules(result, "note")) & expected:
            missed.append((name, after, rules(result), rules(result, "note")))
    assert len(DEFECTS) >= 20 and len(missed) <= 2, missed


@pytest.mark.long
def test_preflight_audits_rewards_of_the_users_own(verb: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def short(rollout, problem):\n    return 1 - len(rollout.text) / 1000\n\n"
        "def near(rollout, problem):\n    try:\n        return float(abs(float(rollout.parsed.answer) - float(problem.answer)) <= 1)\n"
        "    except (AttributeError, TypeError, ValueError):\n        return 0.0\n"
    )
    rewards = "rewards=[correct, {name: 'own.py:short', weight: 0.1}, {name: 'own.py:near', weight: 0.1}]"
    words = ("preflight", "smoke-cpu", "--minutes", "0", "--no-trial", rewards)
    code, out, err = verb(*words, "--json")
    assert code == 0, err
    seen = json.loads(out)["audit"]
    assert "fault" not in seen["short"] and "correct" not in seen
    assert any("nothing: earns 1" in text for text in seen["short"]["note"])
    assert any(text.startswith("an answer that is nearly the gold answer") for text in seen["near"]["fault"])
    _, out, _ = verb(*words)
    assert "reward short" in out and "algorist rewards audit" in out and "note: nothing: earns 1" in out
    _, out, _ = verb(*words[:-1])
    assert "rewards audit" not in out


@pytest.mark.long
def test_a_reward_whose_process_always_ends_is_a_finding(verb: Any, tmp_path: Path) -> None:
    """Only what calls it again, turned or alone, ended it for good, and with it the audit and preflight."""
    file = tmp_path / "gone.py"
    file.write_text(
        "import os\n\n\ndef gone(completions, **_):\n"
        "    if any('answer' in text for text in completions):\n        os._exit(3)\n"
        "    return [0.0 for _ in completions]\n"
    )
    ends = [f for f in audit(f"{file}:gone", "--problems", "8")["findings"] if f["name"] == "ends"]
    assert ends and "ended its process 3 times in a row" in ends[0]["text"]
    words = (f"rewards=[correct, {{name: '{file}:gone', weight: 0.1}}]", "--minutes", "0", "--no-trial")
    code, out, err = verb("preflight", "smoke-cpu", *words, "--json")
    assert code == 0, err
    assert any("3 times in a row" in fault for fault in json.loads(out)["audit"]["gone"]["fault"])
