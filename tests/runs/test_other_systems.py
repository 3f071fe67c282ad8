"""Windows and macOS: without fcntl, resource, fork, SIGHUP and /proc (``tests/plain``) graders, rewards, locks and a whole run still work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAST = (
    "it_answers or late_answer or timeout_ends or covers_the_write or answer_over_the_limit or reward_prints or two_functions "
    "or memory_of_a_reward or lock_names or at_work or (ends_with_its_parent and kill)"
)
"""Tests of the fast part that hold on every system; what they need is what the plain fallbacks must do."""


def call(*words: str, folder: Path) -> tuple[str, set[str]]:
    """Return what a command prints, and what it asked a system in vain for."""
    seen = folder / "seen.txt"
    paths = os.pathsep.join(
        [str(ROOT / "tests/plain"), str(ROOT / "src"), str(ROOT / "packages/grader/src"), str(ROOT)]
    )
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "ALGORIST_SEEN": str(seen),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout, set(seen.read_text().split("\n"))


@pytest.mark.long
@pytest.mark.slow
def test_the_fast_part_without_what_only_posix_has(tmp_path: Path) -> None:
    files = [
        str(ROOT / f"{name}.py")
        for name in (
            "tests/unit/test_child_process",
            "tests/unit/store/test_run_folder",
            "packages/grader/tests/test_workers",
        )
    ]
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-k", FAST]
    shown, seen = call("-m", "pytest", *options, *files, folder=tmp_path)
    assert " passed" in shown or "100%" in shown
    assert {"fcntl", "resource", "os.fork", "os.set_blocking", "signal.SIGHUP"} <= seen


@pytest.mark.long
@pytest.mark.slow
def test_a_run_and_doctor_without_what_only_posix_has(tmp_path: Path) -> None:
    algorist = ("-m", "algorist")
    _, seen = call(*algorist, "run", "smoke-cpu", "threads=1", folder=tmp_path)
    assert (tmp_path / "runs/smoke-cpu/report.html").is_file() and "/proc/cpuinfo" in seen
    shown, _ = call(*algorist, "doctor", "--no-hub", "--json", folder=tmp_path)
    lacks = [text.partition(":")[0] for text in json.loads(shown)["system"]]
    assert lacks == ["file locks", "fork", "SIGHUP", "/proc", "limits of memory"]


@pytest.mark.long
@pytest.mark.slow
def test_what_apples_gpu_has_no_kernel_for_is_for_cpus_only(tmp_path: Path) -> None:
    """torch's own table of kernels knows each operator of SFT, rollouts, GRPO and evaluation."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/mac.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows and all("for CPUs only" in row for row in rows), done.stdout
