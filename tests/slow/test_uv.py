"""uv reads pyproject.toml: it resolves every extra, installs, and runs the command and a test."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = shutil.which("uv")

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(UV is None, reason="uv is not on the PATH; try: pip install uv"),
]


def test_uv_locks_syncs_and_runs(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE", "conftest.py"):
        shutil.copy2(ROOT / name, tmp_path)
    for name in ("src", "tests", "packages"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    environment = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}

    def uv(*arguments: str) -> str:
        done = subprocess.run(
            [str(UV), *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    uv("sync", "--quiet", "--extra", "dev")
    assert (tmp_path / "uv.lock").is_file()
    assert "quickstart" in uv("run", "--no-sync", "algorist", "recipes", "list")
    assert "100%" in uv("run", "--no-sync", "pytest", "-q", "tests/unit/extensions/test_toolkit.py")
