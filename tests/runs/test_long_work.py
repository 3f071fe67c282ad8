"""Long work shows that it goes on; samples on the console, subjects in the JSON, nothing half deleted left behind."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from algorist.config import load_recipe
from algorist.evaluation.run import EvaluationSetting, evaluate
from algorist.prompts import get_format
from algorist.rollouts import make_engine
from algorist.runs.pipeline import run_recipe
from algorist.store.run_log import Lines, LongWork, Quiet
from algorist.types import Problem
from tests.tiny import tiny_policy


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_an_evaluation_moves_inside_a_batch(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("algorist.evaluation.run.EVERY_S", 0.002)
    policy, form, shown = tiny_policy(), get_format("reasoning_answer"), []
    setting = EvaluationSetting(3, 1.0, 1.0, 60, 64, "symbolic", 1)
    problems = [Problem(f"p{n}", f"{n} + 1?", str(n + 1)) for n in range(64)]
    evaluate(
        make_engine(engine, policy.model, policy.tokenizer), policy.tokenizer, problems, form, setting,
        on_progress=lambda done, total: shown.append((done, total)),
    )  # fmt: skip
    counts = [done for done, total in shown if total == 64]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 64
    assert len(set(counts)) > 8 and any(16 < count < 64 for count in counts), (
        counts
    )  # greedy ones are a quarter
    before = len(shown)
    assert not threading.Event().wait(0.05) and len(shown) == before  # over is over


def test_lines_of_long_work_come_soon_and_then_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("algorist.store.run_log.time.monotonic", lambda: now[0])
    work, said = LongWork(), []
    for _ in range(200):
        now[0] += 1
        line = work.line("eval base", 0, 64)
        if line:
            said.append(now[0])
            work.last = now[0]
    gaps = [after - before for before, after in zip([100.0, *said], said, strict=False)]
    assert gaps[0] <= 5 and max(gaps) <= 20 and len(said) < 25


def test_slow_steps_are_shown_however_many_are_to_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("algorist.store.run_log.time.monotonic", lambda: now[0])
    display = Lines()
    display.say("sft begins")
    for step in range(1, 101):
        now[0] += 35
        display.step("sft", step, 2000, {"loss": 0.5}, 1000.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "sft 1/2000 · loss 0.5 · 16:40 left"
    assert 40 < len(lines) < 100, "a line for each step at first, then every second and third"


def test_samples_subjects_and_leftovers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"question": f"What is {n}?", "answer": str(n), "subject": ("odd" if n % 2 else "even")}
        for n in range(24)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        "sft.max_steps=1", "threads=1", f"output_dir={tmp_path}", "grpo.samples_every=1", "run_name=r", "grpo.max_steps=1",
        f"data.eval={{name: local, path: {tmp_path}/rows.jsonl}}", "eval.samples=0",
    ]  # fmt: skip
    recipe = load_recipe("smoke-cpu", settings).recipe
    run_recipe(recipe, display=Quiet(), stages=("sft",))
    left = tmp_path / "r" / "grpo" / ".deleting-checkpoint-1"  # a kill while a checkpoint was deleted
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"x")
    run_recipe(recipe, display=Lines(), resume=True)
    assert not left.exists()
    said = capsys.readouterr().err
    assert (
        "grpo begins" in said
        and "sample at step 1: reward 0.000, " in said
        and " · gold: " in said
        and " · answer: " in said
    )
    subjects = json.loads((tmp_path / "r" / "eval" / "grpo.json").read_text())["subjects"]
    assert set(subjects) == {"odd", "even"} and subjects["odd"]["greedy_accuracy"]["n"] == 12
