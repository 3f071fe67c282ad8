"""``algorist watch``: what it says of a real run, while it is held and when it is over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from algorist.cli.watch_command import blocks, state
from algorist.config import load_recipe
from algorist.pipeline import run_recipe
from algorist.store.run_folder import RunFolder


def test_a_run_is_told(tmp_path: Path) -> None:
    run_recipe(load_recipe("smoke-cpu", [f"output_dir={tmp_path}", "run_name=r", "threads=1"]).recipe)
    folder = RunFolder.open(tmp_path / "r")
    now = state(folder)
    assert not now["running"] and now["stage"] == "grpo" and now["step"] == now["steps"] == 2
    assert {"reward", "accuracy", "tokens"} <= now["curves"].keys() and len(now["curves"]["reward"]) == 2
    assert now["finished_stages"] == ["sft", "eval-sft", "grpo", "eval-grpo"]
    with folder.lock():
        assert state(folder)["running"]
        told = subprocess.run(
            [sys.executable, "-m", "algorist.cli.main", "watch", str(tmp_path / "r"), "--json"],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert json.loads(told.stdout)["running"] is True, told.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "algorist.cli.main", "watch", str(tmp_path / "r"), "--once"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "not running" in shown.stdout and "grpo 2/2" in shown.stdout and "accuracy" in shown.stdout


def test_blocks_follow_the_curve() -> None:
    assert blocks([0.0, 1.0]) == "▁█"
    assert blocks([3.0] * 5) == "▁▁▁▁▁"
    assert len(blocks([float(n % 7) for n in range(1000)])) == 24
