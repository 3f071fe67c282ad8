"""Races of routes: what is said before, what is kept, what is ahead, and how Ctrl-C ends one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorist.extensions.race.expect import Part, expect
from tests.conftest import Verb
from tests.runs.sums import SMALL, Runs, sums


@pytest.fixture
def lines(runs: Runs, tmp_path: Path) -> list[str]:
    """Return the recipe of SFT and GRPO on sums, from the model that knows half of them; every demonstration is wrong."""
    wrong = sums(tmp_path / "wrong.jsonl", 300, seed=9)
    rows = [json.loads(line) for line in wrong.read_text().splitlines()]
    changed = [row | {"demonstrated_answer": "99", "solution": row["question"][:-1] + "99"} for row in rows]
    wrong.write_text("".join(json.dumps(row) + "\n" for row in changed))
    return [
        "quickstart", *SMALL, "threads=1", f"data.train={{name: local, path: {runs.train}}}",
        f"data.sft={{name: local, path: {wrong}}}", f"model.name={runs.model}",
        "sft.max_steps=100", "grpo.max_steps=40", "grpo.batch_size=64", "grpo.max_completion_tokens=32",
    ]  # fmt: skip


Raced = Callable[..., dict[str, Any]]


@pytest.fixture
def race(verb: Verb, lines: list[str]) -> Raced:
    """Race it with what a test changes."""

    def race(*changes: str) -> dict[str, Any]:
        code, output, errors = verb("race", *lines, *changes, "--json")
        assert code == 0, errors
        result: dict[str, Any] = json.loads(output)
        return {**result, "said": errors}

    return race


@pytest.mark.long
def test_wrong_demonstrations_are_not_followed_and_nothing_is_done_twice(race: Raced, tmp_path: Path) -> None:
    first = race("--seconds", "6")
    assert "Their pilots take about 6 seconds" in first["said"] and "quickstart-race" in first["said"]
    assert first["ahead"] == "GRPO alone" and first["close"] == []
    assert "sft.enabled=false" in first["next"] and "grpo.max_steps=" in first["next"]
    by_name = {route["name"]: route for route in first["routes"]}
    assert set(by_name) == {"SFT, then GRPO", "SFT alone", "GRPO alone"}
    behind = by_name["SFT alone"]["gap"]
    assert 0 < behind[1] < behind[0] < behind[2] and by_name["GRPO alone"]["gap"] is None
    assert all(route["seconds"] > 0 for route in first["routes"])
    kept = {file.name: file.read_bytes() for file in (tmp_path / "runs/quickstart-race").glob("*.json")}
    again = race()
    assert {name: again[name] for name in ("ahead", "routes")} == {
        name: first[name] for name in ("ahead", "routes")
    }
    assert {
        file.name: file.read_bytes() for file in (tmp_path / "runs/quickstart-race").glob("*.json")
    } == kept


@pytest.mark.long
def test_what_cannot_be_raced_is_said(verb: Verb, lines: list[str]) -> None:
    code, _, errors = verb("race", *lines, "sft.max_steps=2", "grpo.max_steps=1")
    assert code == 2 and "too short" in errors and "--seconds" in errors
    assert verb("race", *lines, "--seconds", "1", "sft.max_steps=2", "grpo.max_steps=1", "--json")[0] == 0
    code, _, errors = verb("race", *lines, "sft.max_steps=3", "--seconds", "1")
    assert code == 2 and "another recipe or length" in errors and "run_name=" in errors
    code, _, errors = verb("race", "quickstart", "sft.enabled=false", "data.sft=null")
    assert code == 2 and "has one route, GRPO alone" in errors


def part(learner: str, before: float, after: float, tried: float, whole: float) -> Part:
    chance = np.random.default_rng(1)
    one, two = (chance.binomial(4, level, size=100) / 4 for level in (before, after))
    return Part(learner, tried, whole, one, two)


def test_ceilings_decide_and_what_no_pilot_can_show_stays_open() -> None:
    grpo = {"GRPO": [part("grpo", 0.4, 0.45, 4, 80)]}
    wrong = expect({"SFT": [part("sft", 0.4, 0.3, 0.03, 1.0)], **grpo}, 0.1, None, 8)
    assert (wrong.ahead, wrong.close()) == ("GRPO", [])
    value, low, high = wrong.interval("GRPO", "SFT")
    assert 0 < low < value < high
    right = expect({"SFT": [part("sft", 0.4, 0.4, 0.001, 1.0)], **grpo}, 1.0, None, 8)
    assert right.close() != []
    taught = expect({"teacher": [part("teacher", 0.2, 0.25, 4, 200)], **grpo}, 1.0, np.full(100, 0.9), 8)
    assert 0.25 < taught.interval("teacher")[0] < 0.95


def test_an_interval_holds_its_own_value_where_hardly_a_draw_explains_the_pilots() -> None:
    fell = [
        part("sft", 0.9, 0.1, 0.4, 1.0),
        part("grpo", 0.1, 0.95, 4, 80),
    ]  # as no draw of a healthy run does
    odd = expect({"SFT, then GRPO": fell, "GRPO": [part("grpo", 0.9, 0.1, 4, 80)]}, 1.0, None, 8)
    assert 1 / (odd.weights @ odd.weights) >= 100
    for value, low, high in (
        odd.interval("GRPO"),
        odd.interval("SFT, then GRPO"),
        odd.interval("GRPO", "SFT, then GRPO"),
    ):
        assert low < value < high


def test_a_pilot_longer_than_its_run_has_an_end() -> None:
    whole = expect(
        {"SFT": [part("sft", 0.0, 0.01, 3.0, 1.0)], "GRPO": [part("grpo", 0.0, 0.0, 4, 2)]}, 1.0, None, 8
    )
    assert all(np.isfinite(whole.interval(name)).all() for name in ("SFT", "GRPO"))


@pytest.mark.long
def test_ctrl_c_keeps_what_is_done(lines: list[str], tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "algorist", "race", *lines, "--seconds", "40"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip
    first = tmp_path / "runs/quickstart-race/sft-then-grpo.json"
    ends = time.monotonic() + 240
    while not first.is_file() and time.monotonic() < ends:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "stopped" in output and "SFT, then GRPO" in output and "the same command" in output
    assert "Traceback" not in output
