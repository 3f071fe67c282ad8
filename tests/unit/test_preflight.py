"""Preflight: the numbers it foretells against what then happens."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from algorist.config import load_recipe
from algorist.preflight import preflight
from algorist.preflight.passrates import PassRates, fit_pass_rates

TINY = "model.tiny={vocab_size: 300, hidden_size: 32, layers: 1}"


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.3), (2.0, 2.0), (0.5, 4.0), (30.0, 30.0)])
def test_useful_share_is_the_share_of_simulated_groups(a: float, b: float) -> None:
    chance = random.Random(1)
    for size in (4, 16):
        useful = 0
        for _ in range(20_000):
            rate = chance.betavariate(a, b)
            right = sum(chance.random() < rate for _ in range(size))
            useful += 0 < right < size
        assert PassRates(a, b).useful_share(size) == pytest.approx(useful / 20_000, abs=0.012)


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.3), (2.0, 2.0), (0.5, 4.0)])
def test_eight_samples_foretell_larger_groups(a: float, b: float) -> None:
    chance = random.Random(2)
    rates = [chance.betavariate(a, b) for _ in range(400)]
    counts = [sum(chance.random() < rate for _ in range(8)) for rate in rates]
    fitted = fit_pass_rates(counts, 8)
    assert fitted.mean == pytest.approx(a / (a + b), abs=0.05)
    for size in (4, 8, 16, 32):
        assert fitted.useful_share(size) == pytest.approx(PassRates(a, b).useful_share(size), abs=0.06)


def test_nothing_right_is_not_taken_for_impossible() -> None:
    shares = [fit_pass_rates([0] * 24, 8).useful_share(size) for size in (4, 8, 16, 32)]
    assert shares == sorted(shares) and shares[0] > 0 and shares[-1] < 0.2


def test_counts_outside_the_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0 … 8"):
        fit_pass_rates([9], 8)


def test_batch_arithmetic_is_that_of_the_trainers(tmp_path: Path) -> None:
    """The step counts foretold without max_steps are those that TRL's trainers then take."""
    from algorist.pipeline import run_recipe
    from algorist.store.read import metrics, query

    recipe = load_recipe(
        "smoke-cpu",
        [
            TINY, f"output_dir={tmp_path}", "run_name=r", "threads=1", "sft.max_steps=null", "grpo.max_steps=null",
            "sft.epochs=1", "data.sft.params.count=70", "data.train.params.count=22", "grpo.epochs=2", "eval.enabled=false",
            "grpo.num_iterations=2", "grpo.max_completion_tokens=4",
        ],
    ).recipe  # fmt: skip
    found = preflight(recipe, trial=False, problems=2, samples=2)
    run_recipe(recipe)
    for stage in ("sft", "grpo"):
        assert metrics(tmp_path / "r", stage)[-1]["step"] == found.batch[stage]["steps"], stage
    stored = query(tmp_path / "r", "SELECT count(*) AS n FROM rollouts")[0]["n"]
    assert stored == found.batch["grpo"]["rollouts"]


def test_what_is_wrong_is_advised(tmp_path: Path) -> None:
    rows = [{"question": f"{n} and " * 12, "answer": "see figure" if n % 2 else str(n)} for n in range(12)]
    file = tmp_path / "odd.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    recipe = load_recipe(
        "smoke-cpu",
        [
            "model.tiny={vocab_size: 300, hidden_size: 32, layers: 1, max_position_embeddings: 64}", "threads=1",
            f"data.train={{name: local, path: {file}}}", "data.sft=null", "sft.enabled=false", "eval.enabled=false",
            "grpo.max_completion_tokens=40",
        ],
    ).recipe  # fmt: skip
    found = preflight(recipe, trial=False, problems=4, samples=4)
    assert found.prompts["do_not_fit"] == 12
    told = " ".join(advice["why"] for advice in found.advice)
    assert "leave no room for 40 tokens" in told and "cut off at 40 tokens" in told and "be useful" in told
    changes = "\n".join(advice["change"] for advice in found.advice)
    assert "max_prompt_tokens: 24" in changes and "enabled: true" in changes


def planned(*overrides: str) -> dict[str, Any]:
    """Run preflight in a process of its own and return its JSON: memory is that of a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "algorist.cli.main", "preflight", "quickstart", *overrides, "--problems", "8", "--json"],
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("lora", ["null", "{rank: 16}"])
@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_planned_peak_is_near_the_measured_one(stage: str, lora: str) -> None:
    """Within 15 %; benchmarks/memory_plan.py shows three sizes."""
    other = {"sft": "grpo", "grpo": "sft"}[stage]
    memory = planned(
        "model.tiny={hidden_size: 192, layers: 4, vocab_size: 700}", f"model.lora={lora}", f"{other}.enabled=false",
        "grpo.batch_size=64",
    )[stage]["memory"]  # fmt: skip
    assert memory["peak"] == pytest.approx(memory["measured_peak"], rel=0.15), memory
