"""Long work shows that it goes on; samples on the console, subjects in the JSON, nothing half deleted left behind."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from algorist.config import load_recipe
from algorist.evaluation.progress import Pulse
from algorist.runs.pipeline import run_recipe
from algorist.store.run_log import Lines, LongWork, Quiet


def test_an_evaluation_is_heard_of_while_a_batch_is_sampled() -> None:
    heard: list[tuple[int, int]] = []
    several = threading.Event()

    def on_progress(done: int, total: int) -> None:
        heard.append((done, total))
        if len(heard) > 3:
            several.set()

    with Pulse(on_progress, 64, every_s=0.01) as pulse:
        assert several.wait(60)  # no batch is over
        pulse(64, 64)
    assert heard[0] == (0, 64) and heard[-1] == (64, 64)
    before = len(heard)
    assert not threading.Event().wait(0.05) and len(heard) == before  # over is over


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
    assert "grpo begins" in said and "sample at step 1: reward 0.000, " in said and " · gold: " in said
    subjects = json.loads((tmp_path / "r" / "eval" / "grpo.json").read_text())["subjects"]
    assert set(subjects) == {"odd", "even"} and subjects["odd"]["greedy_accuracy"]["n"] == 12
