"""A run of more than an hour says before it begins what it will take, and asks where somebody can answer."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from algorist.cli.preflight_command import how_long
from algorist.config import load_recipe
from algorist.runs.pipeline import Run, run_recipe
from algorist.store.run_log import Quiet

LONG = (
    "threads=1", "model.tiny={vocab_size: 300, hidden_size: 32, layers: 1}", "sft.enabled=false", "grpo.max_steps=9999999",
    "eval.enabled=false",
)  # fmt: skip


class Said(Quiet):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines += text.splitlines()


def said(folder: Path, *settings: str) -> list[str]:
    """Return what a run says before its first step, where it cannot ask."""

    class Begun(Exception):
        pass

    def begins(run: Run) -> None:
        how_long(run, may_ask=False)
        raise Begun

    display = Said()
    with pytest.raises(Begun):
        run_recipe(
            load_recipe("smoke-cpu", [*settings, f"output_dir={folder}", "run_name=r"]).recipe,
            display=display,
            begins=begins,
        )
    return display.lines


def test_a_long_run_says_time_memory_and_what_is_shorter(tmp_path: Path) -> None:
    lines = said(tmp_path, *LONG)
    text = "\n".join(lines)
    assert "GRPO time: " in text and "GRPO memory: " in text and " for 9999999 steps" in text
    assert "half of that with grpo.max_steps=" in text and "about an evening" in text
    (change,) = [line.strip() for line in lines if line.startswith("  grpo.max_steps=")]
    again = said(tmp_path / "again", *LONG, f"grpo.max_steps={int(change.partition('=')[2]) // 6}")
    assert not [line for line in again if "GRPO time" in line], "a sixth of an evening is less than an hour"


def test_a_short_run_begins_without_a_word(tmp_path: Path) -> None:
    assert not [
        line for line in said(tmp_path, *LONG, "grpo.max_steps=5") if "time" in line or "measuring" in line
    ]


@pytest.mark.long
def test_the_question_is_answered_with_no(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "algorist.cli.main",
        "run",
        "smoke-cpu",
        *LONG,
        "run_name=r",
        f"output_dir={tmp_path}",
    ]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )  # fmt: skip
    os.write(ours, b"\n")
    output = process.communicate(timeout=240)[0]
    os.close(ours), os.close(theirs)
    assert process.returncode == 130, output
    assert (
        "begin? yes or no [no]: " in output and "not begun" in output and "holds only its settings" in output
    )
    assert "grpo begins" not in output and not (tmp_path / "r" / "grpo").exists()
