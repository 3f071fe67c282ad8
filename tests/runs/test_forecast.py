"""A forecast against what then happens, and against runs that its fit had not seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorist.config import load_recipe
from algorist.extensions.forecast import Forecast
from algorist.extensions.forecast.fit import Fitted
from algorist.extensions.forecast.table import read_table
from algorist.extensions.forecast.verdict import errors_of
from tests.conftest import Verb
from tests.runs.sums import SMALL, Runs, sums


@pytest.fixture
def lines(runs: Runs, tmp_path: Path) -> list[str]:
    """Return the recipe of GRPO on sums, from the model that knows half of them."""
    held_out = sums(tmp_path / "test.jsonl", 24, seed=9)
    return [
        "quickstart", *SMALL[:1], f"data.train={{name: local, path: {runs.train}}}",
        f"data.eval={{name: local, path: {held_out}}}", f"model.name={runs.model}", "sft.enabled=false",
        "grpo.max_steps=40", "grpo.batch_size=64", "grpo.max_completion_tokens=32",
    ]  # fmt: skip


@pytest.fixture
def forecast(verb: Verb, lines: list[str]) -> Callable[..., dict[str, Any]]:
    """Forecast it with what a test changes."""

    def forecast(*changes: str) -> dict[str, Any]:
        code, output, errors = verb("forecast", *lines, *changes, "--json")
        assert code == 0, errors
        result: dict[str, Any] = json.loads(output)
        return result

    return forecast


def test_a_ruinous_run_and_a_reward_that_is_noise_are_not_trained(
    forecast: Callable[..., dict[str, Any]],
) -> None:
    plain, fast = forecast(), forecast("grpo.learning_rate=0.1")
    assert plain["gain"]["low"] < plain["gain"]["value"] < plain["gain"]["high"]
    assert plain["measured"]["tried"] == 5 and plain["measured"]["agree"] > 0.9
    assert fast["verdict"] == "do not train this" and "the rate is too large" in fast["why"]
    noise = forecast("rewards=[random]")
    assert noise["verdict"] == "do not train this" and "rewards pay for something else" in noise["why"]
    assert "pay for something else" not in plain["why"] and "too large" not in plain["why"]
    assert noise["measured"]["agree"] < 0.2
    short = forecast("grpo.max_steps=2")["measured"]
    assert (short["tried"], short["steps"]) == (2, 2)


def test_preflight_has_a_line_of_it(verb: Verb, lines: list[str]) -> None:
    code, output, errors = verb("preflight", *lines, "--no-trial", "--problems", "12", "--json")
    assert code == 0, errors
    seen = json.loads(output)["extensions"]["forecast"]
    assert seen["gain"]["low"] < seen["gain"]["value"] < seen["gain"]["high"]
    assert "points" in seen["rows"]["to expect"]


def test_the_shipped_table_has_the_errors_that_the_page_states() -> None:
    errors = errors_of(read_table())
    assert errors.fitted + errors.sealed >= 40
    page = " ".join((Path(__file__).parents[2] / "docs/results.md").read_text(encoding="utf-8").split())
    assert f"Of {errors.sealed} later runs {errors.covered:.0%}".replace("%", " %") in page
    assert f"off by {100 * errors.off:.1f} points" in page
    assert f"{errors.warned} of {errors.lost} that lost and {errors.alarms} of {errors.healthy}" in page
    assert errors.covered > 0.8 and errors.warned == errors.lost > 0


def row(chance: np.random.Generator) -> dict[str, Any]:
    """Simulate a run whose gain follows its trial, with noise."""
    rates = chance.beta(1, 1, size=48)
    right = chance.binomial(8, rates)
    spread = float(np.mean(rates * (1 - rates)))
    shift = float(chance.uniform(-0.5, 1) * spread / 5)
    gain = 4 * shift + float(chance.normal(0, 0.1 * np.sqrt(spread)))
    return {
        "right": right.tolist(), "right_after": right.tolist(), "samples": 8, "shift": shift, "work": 5.0, "drift": 0.3, "tokens": 20,
        "agree": 0.9, "useful": 0.8, "gain": [gain, gain, gain],
    }  # fmt: skip


def test_nine_of_ten_new_runs_lie_in_the_interval() -> None:
    chance = np.random.default_rng(1)
    held = []
    for _ in range(20):
        model = Fitted([row(chance) for _ in range(30)])
        new = [row(chance) for _ in range(20)]
        gains = [model.forecast(one) for one in new]
        held += [g.low <= one["gain"][0] <= g.high for one, g in zip(new, gains, strict=True)]
    assert 0.86 <= np.mean(held) <= 0.96


@pytest.mark.long
def test_a_finished_run_becomes_a_row(verb: Verb, tmp_path: Path) -> None:
    lines = (
        "threads=1",
        "sft.max_steps=60",
        "grpo.max_steps=6",
        "eval.samples=2",
        "grpo.max_completion_tokens=12",
    )
    assert verb("run", "smoke-cpu", *lines, "run_name=first")[0] == 0
    code, output, errors = verb("forecast", "runs/first", "--add", "mine.jsonl", "--problems", "4")
    assert code == 0, errors
    (row,) = read_table(tmp_path / "mine.jsonl")
    result = json.loads((tmp_path / "runs/first/result.json").read_text())
    assert row["name"] == "first" and row["steps"] == 6 and "happened" in output
    assert row["gain"][0] == pytest.approx(result["difference"]["pass@1"]["value"], abs=1e-4)
    code, _, errors = verb("forecast", "smoke-cpu", *lines, "--add", "mine.jsonl")
    assert code == 2 and "smoke-cpu is no finished run" in errors and "--add takes a run's folder" in errors


def test_a_teacher_alone_has_no_gain_of_rewards_to_expect() -> None:
    """The table is of runs that are paid; a reward of weight 0 pays nothing."""
    assert Forecast.takes_part(load_recipe("quickstart").recipe)
    assert not Forecast.takes_part(load_recipe("quickstart-distill").recipe)
