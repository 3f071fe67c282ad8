"""A run killed at random moments ends as the run that nobody killed: ``kill_runs`` with few kills; by hand with many."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.marks import first
from tests.warm import PYTHON


@pytest.mark.parametrize("kills", first(1, [3, 12]))
def test_killed_and_resumed_is_the_same_run(kills: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [PYTHON, "-m", "tests.slow.kill_runs", "--kills", str(kills), "--folder", str(tmp_path), "--seed", "3"],
        capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["different"] == [] and told["kills"] >= kills and told["rollouts"] > 0, told
