"""How the end-to-end tests call the command line: a real process, as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run ``algorist`` in a folder of the test's own; stdout and stderr are captured."""

    def call(*arguments: str, stdin: str = "", timeout: float = 240) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "algorist.cli.main", *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
        )

    return call
