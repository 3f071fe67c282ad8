"""Preflight keeps to the time it is given: fewer problems and steps, never none, and it says what it does."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from algorist.cli.main import main


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> Any:
    def preflight(*words: str) -> tuple[dict[str, Any], str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(
            sys, "argv", ["algorist", "preflight", "smoke-cpu", "threads=1", "--json", *words]
        )
        with pytest.raises(SystemExit) as stop:
            main()
        told = capsys.readouterr()
        assert stop.value.code == 0, told.err
        return json.loads(told.out), " ".join(told.err.split())

    return preflight


def test_hardly_any_time_still_gives_an_answer(call: Any) -> None:
    found, told = call("--minutes", "0", "--problems", "24")
    assert found["sampling"]["problems"] == 2 and "--minutes" in told
    assert found["sft"]["seconds_per_step"] > 0 and found["grpo"]["seconds_per_step"] > 0
    assert (
        "trying a few SFT steps (0:00 left)" in told
        and "sampling 8 completions for 24 problems (0:00 left)" in told
    )


def test_time_enough_takes_all_problems(call: Any) -> None:
    found, told = call("--minutes", "60", "--problems", "6", "--no-trial")
    assert found["sampling"]["problems"] == 6 and "sampling 8 completions for 6 problems (" in told
