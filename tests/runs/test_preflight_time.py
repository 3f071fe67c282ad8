"""Preflight keeps to the time it is given: fewer problems and steps, never none, and it says what it does."""

from __future__ import annotations

import json
from typing import Any

import pytest


@pytest.fixture
def preflight(verb: Any) -> Any:
    def preflight(*words: str) -> tuple[dict[str, Any], str]:
        code, output, told = verb("preflight", "smoke-cpu", "threads=1", "--json", *words)
        assert code == 0, told
        return json.loads(output), told

    return preflight


def test_hardly_any_time_still_gives_an_answer(preflight: Any) -> None:
    settings = (
        "eval.samples=2",
        "eval.baseline=true",
        "sft.eval_every=10",
        "sft.max_steps=24",
        "grpo.group_size=2",
    )
    found, told = preflight("--minutes", "0", "--problems", "24", *settings)
    assert found["sampling"]["problems"] == 2 and "--minutes" in told
    assert found["sft"]["seconds_per_step"] > 0 and found["grpo"]["seconds_per_step"] > 0
    assert (
        "trying a few SFT steps (0:00 left)" in told
        and "sampling 8 completions for 24 problems (0:00 left)" in told
    )
    planned = found["evaluations"]  # of the start, after each stage, and SFT's steps 10 and 20 of 24
    assert (planned["evaluations"], planned["completions"]) == (5, 3) and planned["seconds"] > 0
    assert list(found["sampling"]["useful_share"]) == ["2", "4", "8", "16", "32"]


def test_time_enough_takes_all_problems(preflight: Any) -> None:
    settings = ("grpo.advantage=reinforce", "eval.enabled=false", "rewards=[correct]")
    found, told = preflight("--minutes", "60", "--problems", "6", "--no-trial", *settings)
    assert found["evaluations"] is None
    assert found["sampling"]["problems"] == 6 and "sampling 8 completions for 6 problems (" in told
