"""``algorist watch``: what it says of a real run, while it is held and when it is over."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console, RenderableType

from algorist.cli.watch_command import blocks, picture, state
from algorist.config import load_recipe
from algorist.runs.pipeline import run_recipe
from algorist.store.run_folder import RunFolder
from tests.conftest import Cli


def test_a_run_is_told(tmp_path: Path, call: Cli) -> None:
    run_recipe(load_recipe("smoke-cpu", [f"output_dir={tmp_path}", "run_name=r", "threads=1"]).recipe)
    folder = RunFolder.open(tmp_path / "r")
    now = state(folder)
    assert not now["running"] and now["stage"] == "grpo" and now["step"] == now["steps"] == 2
    assert {"reward", "accuracy", "tokens"} <= now["curves"].keys() and len(now["curves"]["reward"]) == 2
    assert now["finished_stages"] == ["sft", "eval-sft", "grpo", "eval-grpo"]
    with folder.lock():
        assert state(folder)["running"]
        assert json.loads(call("watch", str(tmp_path / "r"), "--json").stdout)["running"] is True
    shown = call("watch", str(tmp_path / "r"), "--once")
    assert "not running" in shown.stdout and "grpo 2/2" in shown.stdout and "accuracy" in shown.stdout


def test_a_stage_measured_in_epochs_shows_its_steps_as_far_as_they_are_known(tmp_path: Path) -> None:
    words = [f"output_dir={tmp_path}", "run_name=r", "threads=1", "eval.enabled=false", "grpo.enabled=false"]
    words += ["sft.max_steps=null", "sft.epochs=0.25", "data.sft.params.count=160"]
    run_recipe(load_recipe("smoke-cpu", words).recipe)
    folder = RunFolder.open(tmp_path / "r")
    now = state(folder)
    assert now["stage"] == "sft" and now["step"] == now["steps"] == 3  # a quarter of 10 batches of 16
    assert "sft 3/3 ·" in shown(picture(now))
    for checkpoint in (tmp_path / "r" / "sft").glob("checkpoint-*"):
        checkpoint.rename(tmp_path / checkpoint.name)
    now = state(folder)
    assert now["steps"] is None and "sft 3 ·" in shown(picture(now)) and "?" not in shown(picture(now))


def shown(picture: RenderableType) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(picture)
    return console.export_text()


def test_blocks_follow_the_curve() -> None:
    assert blocks([0.0, 1.0]) == "▁█"
    assert blocks([3.0] * 5) == "▁▁▁▁▁"
    assert len(blocks([float(n % 7) for n in range(1000)])) == 24
