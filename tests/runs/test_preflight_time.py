"""Preflight says time and memory before it samples anything, keeps to the time it is given, and shows what it knows when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from algorist.config import load_recipe
from algorist.preflight import Preflight, preflight
from algorist.runs.draft import Draft
from algorist.runs.plan import make_plan
from algorist.store.run_log import duration

TINY = (
    "threads=1",
    "model.tiny={vocab_size: 300, hidden_size: 32, layers: 1, max_position_embeddings: 30000}",
)
ENDLESS = (
    *TINY,
    "sft.enabled=false",
    "grpo.max_completion_tokens=20000",
    "grpo.max_steps=9999",
    "eval.enabled=false",
)
"""Hours of sampling on any machine."""


def recipe(*settings: str) -> Any:
    return load_recipe("smoke-cpu", list(settings)).recipe


def test_without_sampling_there_are_time_and_memory(verb: Any) -> None:
    settings = (
        "eval.samples=2",
        "eval.baseline=true",
        "sft.eval_every=10",
        "sft.max_steps=24",
        "grpo.group_size=2",
    )
    words = ("preflight", "smoke-cpu", "threads=1", "--no-trial", "--minutes", "0")
    code, output, errors = verb(*words, "--json", *settings)
    assert code == 0, errors
    seen = json.loads(output)
    assert seen["sampling"] == {} and not seen["stopped"]
    for stage in ("sft", "grpo"):
        assert seen[stage]["seconds"] == pytest.approx(seen[stage]["steps"] * seen[stage]["seconds_per_step"])
        assert seen[stage]["memory"]["peak"] > 0 and "tried" not in seen[stage]
    planned = seen["evaluations"]  # of the start, after each stage, and SFT's steps 10 and 20 of 24
    assert (planned["evaluations"], planned["completions"]) == (5, 3) and planned["seconds"] > 0
    shown = verb(*words, *settings)[1]
    assert all(
        f"{row}  " in shown for row in ("GRPO time", "GRPO memory", "SFT time", "evaluations", "in all")
    )
    assert "nothing to change that can be known" in shown


def test_a_long_held_out_question_is_in_the_time_of_evaluations(verb: Any, tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(4)]
    rows[0]["question"] = "Sam has 3 pens. " * 400
    file = tmp_path / "held.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = (
        f"data.eval={{name: local, path: {file}}}",
        "model.tiny.max_position_embeddings=4096",
        "sft.enabled=false",
    )
    code, output, errors = verb(
        "preflight", "smoke-cpu", "threads=1", "--no-trial", "--minutes", "0", *data, "--json"
    )
    assert code == 0, errors
    seen = json.loads(output)
    longest = seen["prompts"]["longest_held_out"]
    assert seen["prompts"]["p100"] < 100 < 1000 < longest
    at_least = seen["speed"]["prompt"] * longest * seen["evaluations"]["evaluations"]
    assert seen["evaluations"]["seconds"] > 0.9 * at_least


def test_time_enough_takes_all_problems_and_real_steps(verb: Any) -> None:
    settings = ("threads=1", "grpo.advantage=reinforce", "eval.enabled=false", "rewards=[correct]")
    code, output, errors = verb(
        "preflight", "smoke-cpu", "--minutes", "60", "--problems", "12", "--json", *settings
    )
    assert code == 0, errors
    seen = json.loads(output)
    assert seen["evaluations"] is None and seen["sampling"]["problems"] == 12 and seen["sampling"]["judged"]
    assert "sampling 8 completions of 12 problems" in errors
    assert all(
        seen[stage]["tried"] and seen[stage]["memory"]["measured_peak"] > 0 for stage in ("sft", "grpo")
    )


@pytest.mark.long
def test_the_time_is_kept_whatever_a_completion_takes() -> None:
    """Sampling ends between two tokens, and says how far it came; a step that does not fit into the time is not tried."""
    begun: list[float] = []
    plan = make_plan(Draft.of(recipe(*ENDLESS), in_folder=False))
    seen = preflight(plan, minutes=0.2, show=lambda _: begun.append(time.monotonic()))
    assert time.monotonic() - begun[0] < 12 + 15, "a busy machine has some seconds more"
    assert seen.grpo is not None and not seen.stopped


def test_few_problems_give_no_verdict(verb: Any) -> None:
    words = (
        "preflight",
        "smoke-cpu",
        *TINY,
        "sft.enabled=false",
        "eval.enabled=false",
        "grpo.max_completion_tokens=8",
    )
    few = verb(*words, "--no-trial", "--problems", "2")[1]
    assert "2 problems × 8" in few and "too little to judge" in few and "useful" not in few
    enough = verb(*words, "--no-trial", "--problems", "12")[1]
    assert "useful groups" in enough and "pass rate 0.0 % [0.0 %, " in enough


@pytest.mark.long
def test_ctrl_c_shows_what_is_known(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "algorist.cli.main",
        "preflight",
        "smoke-cpu",
        *ENDLESS,
        "--minutes",
        "9",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )  # fmt: skip
    assert process.stdout is not None
    before = []
    for line in process.stdout:
        before.append(line)
        if line.startswith("sampling"):
            break
    assert any(line.startswith("GRPO memory") for line in before), (
        "the first figures come before any sampling"
    )
    process.send_signal(signal.SIGINT)
    after = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "takes_too_long" in after and after.rstrip().endswith("stopped"), (
        after
    )


def test_measuring_leaves_weights_and_chance_as_they_were(tmp_path: Path) -> None:
    """A run that was measured before it began is the run that was not, to the bit."""
    from safetensors.torch import load_file

    from algorist.preflight.time import measure
    from algorist.runs.pipeline import Run, run_recipe
    from algorist.store.run_log import Quiet

    def look(run: Run) -> None:
        measure(run.recipe, run.loaded(), [1, 2, 3, 4, 5, 6], run.plan.device)

    small = (
        *TINY,
        "eval.enabled=false",
        "sft.max_steps=3",
        "grpo.max_steps=2",
        "grpo.max_completion_tokens=6",
    )
    weights = []
    for name, begins in (("plain", lambda _: None), ("measured", look)):
        run_recipe(
            recipe(*small, f"output_dir={tmp_path}", f"run_name={name}"), display=Quiet(), begins=begins
        )
        weights.append(load_file(tmp_path / name / "grpo/final/model.safetensors"))
    assert all((weights[0][key] == weights[1][key]).all() for key in weights[0])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (40, "40 seconds"),
        (720, "12 minutes"),
        (12_600, "3.5 hours"),
        (80_000, "22 hours"),
        (2_160_000, "25 days"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.long
@pytest.mark.slow
def test_planned_steps_take_about_as_long_as_tried_ones() -> None:
    """Without what others take of the processor; benchmarks show it for real models."""
    planned: list[dict[str, float]] = []

    def note(first: Preflight) -> None:
        assert first.sft is not None and first.grpo is not None
        planned.append({"sft": first.sft["seconds_per_step"], "grpo": first.grpo["seconds_per_step"]})

    seen = preflight(
        make_plan(
            Draft.of(load_recipe("quickstart", ["threads=1", "eval.enabled=false"]).recipe, in_folder=False)
        ),
        problems=4,
        minutes=10,
        show=note,
    )
    assert seen.sft is not None and seen.grpo is not None
    for stage, tried in (("sft", seen.sft), ("grpo", seen.grpo)):
        assert 0.5 < tried["seconds_per_step"] / planned[0][stage] < 2, (stage, planned, tried)
