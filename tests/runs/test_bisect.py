"""Which line makes a run fail: planted ones are named, alone, together and in the data; what is kept, what is refused."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from algorist.config import load_recipe
from tests.conftest import Verb
from tests.runs.sums import Runs, sums

pytestmark = pytest.mark.long
STEPS = ["grpo.max_steps=24", "grpo.save_steps=24"]
Bisected = Callable[..., dict[str, Any]]


@pytest.fixture
def bisected(verb: Verb) -> Bisected:
    """Bisect a run; returns the object that is printed."""

    def bisected(*arguments: str) -> dict[str, Any]:
        code, output, errors = verb("bisect", *arguments, "--json")
        assert code == 0, errors
        return dict(json.loads(output), said=errors)

    return bisected


def test_what_differs_from_a_run_that_works_is_the_cause(runs: Runs, bisected: Bisected) -> None:
    good = runs("bisect-good", *STEPS)
    own = ["rewards=[{name: correct, weight: -1}]", "grpo.temperature=1.1", "grpo.adam_beta2=0.99"]
    bad = runs("bisect-bad", *STEPS, *own)
    result = bisected(str(bad), "--like", str(good))
    cause = " ".join(result["cause"])
    assert "the reward correct" in cause and "adam_beta2" not in cause and result["sure"], cause
    assert (
        "rewards=" in result["next"]
        and "weight: -1" not in result["next"]
        and f"{bad}/config.yaml" in result["next"]
    )
    first = result["trials"][0]
    assert first["better"] and len(first["lines"]) == 4 and first["rollouts"] > 0
    place = bad.parent / "bisect-bad-bisect"
    kept = {file: file.stat().st_mtime_ns for file in place.glob("trial-*/*")}
    assert len([*place.glob("trial-*")]) == len(result["trials"])
    assert not [*place.glob("trial-*/grpo")]  # weights take room
    again = bisected(str(bad), "--like", str(good))
    assert again["cause"] == result["cause"] and "long as the run" in again["said"]
    assert kept == {file: file.stat().st_mtime_ns for file in place.glob("trial-*/*")}
    config = bad / "config.yaml"  # another run in the folder of this one has trials of its own
    config.write_text(re.sub(r"^seed: .*$", "seed: 7", config.read_text(), flags=re.MULTILINE))
    bisected(str(bad), "--like", str(good), "--trials", "2")
    assert set(kept) < set(place.glob("trial-*/*"))


def test_without_one_that_works_lines_are_set_to_what_does_nothing(
    runs: Runs, bisected: Bisected, verb: Verb
) -> None:
    bad = runs("bisect-noise", *STEPS, "rewards=[correct]", "grpo.temperature=3", "grpo.adam_beta2=0.99")
    result = bisected(str(bad), "--trials", "20")
    assert result["cause"] == ["grpo.temperature: 3.0 → 1.0"] and result["change"] == ["grpo.temperature=1.0"]
    few = bisected(str(bad), "--trials", "1")
    assert not few["sure"] and few["cause"] == result["cause"]  # the first trial is what diagnose proposes
    code, output, _ = verb("bisect", str(bad), "--trials", "1")
    assert code == 0 and "More trials tell" in output and "rollouts" in output


def test_rewards_that_differ_in_their_parameters_are_tried_as_the_good_run_has_them(
    runs: Runs, bisected: Bisected, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def sized(completions, sign=1.0, **_):\n    return [sign * len(c) / 9 for c in completions]\n"
    )
    rewards = "rewards=[{{name: target_length, params: {{target_tokens: {}}}}}, {{name: '{}:sized', params: {{sign: {}}}}}]"
    good, bad = (
        runs(f"bisect-params-{name}", "grpo.max_steps=8", rewards.format(tokens, own, sign))
        for name, tokens, sign in (("good", 1, -1), ("bad", 23, 1))
    )
    result = bisected(str(bad), "--like", str(good), "--trials", "1")
    (trial,) = result["trials"]
    assert [line.partition(" (")[0] for line in trial["lines"]] == [
        "the reward target_length",
        "the reward own.py:sized",
    ]
    assert "target_tokens: 1" in trial["lines"][0] and "sign: -1" in trial["lines"][1]
    (place,) = (bad.parent / f"{bad.name}-bisect").glob("trial-*")
    tried = load_recipe(str(place / "config.yaml")).recipe.rewards
    assert [reward.params for reward in tried] == [{"target_tokens": 1}, {"sign": -1}]


def test_training_problems_that_teach_nothing_are_the_cause(
    runs: Runs, bisected: Bisected, tmp_path: Path
) -> None:
    wrong, held_out = (
        sums(tmp_path / "wrong.jsonl", 400, seed=7, shift=3),
        sums(tmp_path / "held.jsonl", 200, seed=8),
    )
    measured = [
        "eval.enabled=true",
        "eval.samples=2",
        f"data.eval={{name: local, path: {held_out}, split: train}}",
    ]
    bad = runs("bisect-data", *STEPS, *measured, "rewards=[correct]", data=wrong)
    result = bisected(str(bad), "--trials", "20")
    assert [line.split(":")[0] for line in result["cause"]] == ["data.train"], result["cause"]
    assert len(result["trials"]) <= 3, "a file of the user's is tried before lines that are tried one by one"
    assert "inspect" in result["next"]


def test_what_cannot_be_compared_is_refused(verb: Verb, runs: Runs, tmp_path: Path) -> None:
    code, _, errors = verb("bisect", str(tmp_path / "nothing"))
    assert code == 2 and "is not a run folder" in errors
    code, _, errors = verb("bisect", str(runs.model.parents[1]))
    assert code == 2 and "has neither an evaluation nor rollouts" in errors


def test_ctrl_c_keeps_finished_trials(runs: Runs, tmp_path: Path) -> None:
    bad = runs("bisect-stopped", *STEPS, "rewards=[{name: correct, weight: -1}]", "grpo.temperature=1.1")
    command = [sys.executable, "-m", "algorist", "bisect", str(bad), "--trials", "4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("trial 2"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait() == 130 and "finished trials are kept" in rest
