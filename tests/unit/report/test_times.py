"""Seconds of a run: those between logged steps add up, a pause is no training and no pace."""

from __future__ import annotations

import math
from typing import Any

import pytest

from algorist.cli.watch_command import _seconds_left
from algorist.report.collect import training_seconds
from algorist.training.metrics import Averages


def lines(*times: float) -> list[dict[str, Any]]:
    return [{"stage": "grpo", "step": n, "loss": 0.1, "time": t} for n, t in enumerate(times, start=1)]


def test_a_pause_is_no_training() -> None:
    resumed = lines(0, 2, 4, 3604, 3606)
    assert training_seconds(resumed) == 10 and training_seconds(lines(0, 2, 5)) == 7.5
    assert training_seconds([]) == training_seconds(lines(7)) == 0
    assert _seconds_left(resumed, 10) == 10 == _seconds_left(lines(0, 2, 4, 6, 8), 10)


def test_steps_before_the_first_line_of_a_stage_are_training_too() -> None:
    every = [
        {"stage": s, "step": n, "loss": 0.1, "time": 2 * n + 100 * (s == "grpo")}
        for s in ("sft", "grpo")
        for n in range(1, 13)
    ]
    assert (
        training_seconds(every) == training_seconds([line for line in every if line["step"] % 3 == 0]) == 48
    )


def test_seconds_between_two_lines_add_up() -> None:
    averages = Averages()
    for loss in (1.0, 3.0, math.nan):
        averages.add({"loss": loss, "time/update_s": 0.5})
    averages.add({"time/rollout_s": 2.0})
    assert averages.take() == {"loss": 2.0, "time/update_s": pytest.approx(1.5), "time/rollout_s": 2.0}
    assert averages.take() == {}
