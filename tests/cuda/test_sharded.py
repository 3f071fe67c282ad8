"""FSDP2 in two processes (gloo, CPU): rollouts without collectives, the packed update, and what is refused."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.warm import PYTHON

SCRIPT = Path(__file__).with_name("sharded_process.py")


@pytest.mark.slow
def test_rollouts_and_update_of_a_sharded_model() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [PYTHON, str(SCRIPT)],
            env={**os.environ, **group, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    ends = [process.communicate(timeout=400) for process in started]
    for process, (output, errors) in zip(started, ends, strict=True):
        assert process.returncode == 0, errors
        found = json.loads(output.splitlines()[-1])
        assert found["same_tokens"]
        assert len(found["refused"]) == 2
        for words in found["refused"]:
            assert "the run would hang" in words and "--launch ddp" in words
        assert found["tokens"][0] == 1 and found["tokens"][1] > 10, (
            "each completion would be a pass of its own"
        )
        assert found["log_probs"] < 1e-5 and found["gradients"] < 1e-4
