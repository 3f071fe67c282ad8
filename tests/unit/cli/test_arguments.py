"""Which model a verb takes: the newest run that has one, a stage's result, a folder, a hub name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from algorist.cli.arguments import find_model, read_recipe
from algorist.cli.terminal import compact
from algorist.errors import CheckpointError, ConfigError


def make_run(runs: Path, name: str, age: int, *folders: str) -> Path:
    for folder in folders:
        (runs / name / folder).mkdir(parents=True)
    (runs / name).mkdir(parents=True, exist_ok=True)
    config = runs / name / "config.yaml"
    config.write_text("name: x\n")
    os.utime(config, (1e9 - age, 1e9 - age))
    return runs / name


def test_the_newest_run_with_a_model(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(CheckpointError, match="make one: algorist run quickstart"):
        find_model(None, runs)
    empty = make_run(runs, "empty", 1)
    with pytest.raises(CheckpointError, match="has no trained model yet"):
        find_model(None, runs)
    begun = make_run(runs, "begun", 2, "sft/checkpoint-5")
    assert find_model(None, runs) == (begun / "sft" / "checkpoint-5", begun)
    make_run(runs, "old", 3, "sft/final", "grpo/final")
    assert find_model(None, runs)[1] == begun
    with pytest.raises(CheckpointError, match="has no trained model yet"):
        find_model(str(empty), runs)
    assert find_model(str(runs / "old"))[0] == runs / "old" / "grpo" / "final"
    assert find_model(str(runs / "old" / "sft" / "final")) == (runs / "old" / "sft" / "final", runs / "old")


def test_a_mistyped_run_is_not_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "runs", "quickstart", 1, "grpo/final")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no run or model at 'runs/quikstart'\. Did you mean 'quickstart'"):
        find_model("runs/quikstart")
    assert find_model("Qwen/Qwen2.5-0.5B") == ("Qwen/Qwen2.5-0.5B", None)


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_two_lengths_on_the_command_line_are_refused(stage: str) -> None:
    with pytest.raises(ConfigError, match=rf"{stage}.max_steps and {stage}.epochs both say how long"):
        read_recipe("quickstart", [f"{stage}.max_steps=5", f"{stage}.epochs=2"])
    assert (
        getattr(read_recipe("quickstart", [f"{stage}.max_steps=null", f"{stage}.epochs=2"]), stage).epochs
        == 2
    )


def test_blanks_of_a_completion_do_not_fill_the_screen() -> None:
    assert compact("\n" * 64) == "(nothing but 64 blanks and line ends)" and compact("") == "(nothing)"
    assert compact("\n a\n\n\nb\n\n \n\n\nc \n\n\n\n") == "a\n\n\nb\n(5 line ends)\nc"
