"""Preflight's speed of sampling is that of the machine, though the first call of an engine has more to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from algorist.config import load_recipe
from algorist.preflight import time as preflight_time
from tests.tiny import tiny_policy

FIRST, CALL, PROMPT, STEP, ROW = 3.0, 2.0, 0.001, 0.05, 0.01
"""Seconds: what the first call has beside, a call, a token of a prompt, a decode step, and a row in it."""


def test_the_first_call_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def generate(prompts: list[list[int]], rows: int, params: Any) -> None:
        first = FIRST if not clock[0] else 0.0
        clock[0] += first + CALL + PROMPT * len(prompts[0]) + params.max_new_tokens * (STEP + ROW * rows)

    monkeypatch.setattr(preflight_time, "free_clock", lambda: clock[0])
    monkeypatch.setattr(preflight_time, "make_engine", lambda *_: SimpleNamespace(generate=generate))
    changes = ["grpo.batch_size=64", "grpo.group_size=8", "grpo.max_completion_tokens=256"]
    recipe = load_recipe("smoke-cpu", changes).recipe
    call, prompt, step, row = preflight_time._sampling(recipe, tiny_policy(), [1] * 100, torch.device("cpu"))
    assert call == pytest.approx(CALL, rel=0.05) and prompt == pytest.approx(PROMPT, rel=0.2)
    assert step + 64 * row == pytest.approx(STEP + 64 * ROW, rel=0.02)
