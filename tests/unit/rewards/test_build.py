"""Rewards: stated values, every completion form that TRL sends, failures counted, own functions from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from algorist.config.schema import RewardSection
from algorist.errors import ConfigError
from algorist.prompts import get_format
from algorist.rewards import REWARDS, build_rewards, reward

FORM = get_format("reasoning_answer")
RIGHT = "<reasoning>\n3 + 4 = 7\n</reasoning>\n<answer>\n7\n</answer>"


def value(name: str, completion: Any, gold: str = "7") -> float:
    (function,) = build_rewards([RewardSection(name=name)], FORM, matcher="numeric")
    return function(prompts=["p"], completions=[completion], answer=[gold], unknown=[1])[0]


@pytest.mark.parametrize(
    ("name", "completion", "expected"),
    [
        ("correct", RIGHT, 1.0),
        ("correct", RIGHT.replace("\n7\n", "\n7.0\n"), 1.0),
        ("correct", RIGHT.replace("\n7\n", "\n8\n"), 0.0),
        ("correct", "7", 0.0),
        ("correct", "", 0.0),
        ("correct", RIGHT + "<answer>8</answer>", 0.0),
        ("correct", "<reasoning><answer>7</answer></reasoning>", 0.0),
        ("well_formed", RIGHT, 1.0),
        ("well_formed", RIGHT + " done", 0.0),
        ("tag_fraction", RIGHT, 1.0),
        ("tag_fraction", "<answer>7", 0.25),
        ("tag_fraction", "", 0.0),
        ("numeric", RIGHT, 1.0),
        ("numeric", RIGHT.replace("\n7\n", "\nnan\n"), 0.0),
        ("numeric", RIGHT.replace("\n7\n", "\ninf\n"), 0.0),
    ],
)
def test_stated_values(name: str, completion: str, expected: float) -> None:
    assert value(name, completion) == expected


def test_every_form_of_a_completion() -> None:
    message = {"role": "assistant", "content": RIGHT}
    assert [value("correct", form) for form in (RIGHT, message, [message], [RIGHT])] == [1.0] * 4


def test_the_total_of_oneshot_is_at_most_1_2() -> None:
    from algorist.config import load_recipe

    recipe = load_recipe("oneshot-gsm8k").recipe
    functions = build_rewards(recipe.rewards, FORM, matcher=recipe.matcher)
    total = sum(
        s.weight * f(completions=[RIGHT], answer=["7"])[0]
        for s, f in zip(recipe.rewards, functions, strict=True)
    )
    assert total == pytest.approx(1.2)


def test_a_reward_that_raises_gives_its_floor_and_is_counted() -> None:
    @reward("broken-for-test", low=-2.0, high=0.0)
    def broken(completion: str, **_: Any) -> float:
        raise ZeroDivisionError

    try:
        (function,) = build_rewards([RewardSection(name="broken-for-test")], FORM, matcher="numeric")
        assert function(completions=["a", "b"], answer=["1", "2"]) == [-2.0, -2.0]
        assert function.failures == 2
    finally:
        REWARDS._entries.pop("broken-for-test")


def test_own_function_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def short(completions, **columns):\n    return [float(len(c) < 5) for c in completions]\n"
    )
    (function,) = build_rewards([RewardSection(name=f"{file}:short")], FORM, matcher="numeric")
    assert function(completions=["abc", "abcdef"], answer=["", ""]) == [1.0, 0.0]
    with pytest.raises(ConfigError, match="short"):
        build_rewards([RewardSection(name=f"{file}:long")], FORM, matcher="numeric")
    with pytest.raises(ConfigError, match="nowhere"):
        build_rewards([RewardSection(name="nowhere.py:short")], FORM, matcher="numeric")
    with pytest.raises(ConfigError, match="Did you mean 'correct'"):
        build_rewards([RewardSection(name="corect")], FORM, matcher="numeric")
