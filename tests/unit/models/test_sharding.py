"""Weights in parts on several processes, as far as one process can show it: ZeRO-3's hooks, and who says that it waits."""

from __future__ import annotations

import time
from typing import Any

import pytest

from algorist.errors import EngineError
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.native.engine import NativeEngine
from algorist.training import distributed
from tests.tiny import make_model


def as_zero_3_leaves_it(model: Any) -> Any:
    """Mark the parameters as DeepSpeed does, and hook every module with what would wait for the other processes."""

    def gather(*_: Any) -> None:
        raise AssertionError("a collective in the decode loop: the processes would hang")

    gather.__module__ = "deepspeed.runtime.zero.parameter_offload"
    for module in model.modules():
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(gather)
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number
    return model


def test_rollouts_of_zero_3_call_no_module() -> None:
    """Its hooks gather weights at every call of a module, and the processes end their completions at different steps."""
    params = SamplingParams(max_new_tokens=6, seed=3)
    expected = NativeEngine(make_model()).generate([[5, 6, 7]], 3, params)
    model = as_zero_3_leaves_it(make_model())
    assert NativeEngine(model).generate([[5, 6, 7]], 3, params) == expected
    with pytest.raises(EngineError, match=r"the run would hang.*--launch ddp"):
        NativeEngine(model, tier="module")


def test_a_process_that_waits_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(distributed, "REMINDER_S", 0.05)
    monkeypatch.setenv("RANK", "1")
    for world, said in (("1", False), ("2", True)):
        monkeypatch.setenv("WORLD_SIZE", world)
        with distributed.reminder("for the rollouts of the other processes"):
            text, until = "", time.monotonic() + (60 if said else 0.2)
            while time.monotonic() < until and "--resume" not in text:
                time.sleep(0.02)
                text += capsys.readouterr().err
        assert ("process 1 has been waiting for the rollouts of the other processes" in text) == said
