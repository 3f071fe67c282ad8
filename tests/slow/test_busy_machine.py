"""Verdicts do not depend on load: the tests of the grader's pairs and workers pass beside busy processes.

By hand, on any test: ``python -m tests.slow.test_busy_machine packages/grader/tests``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"
GRADING = [f"packages/grader/tests/test_{name}.py" for name in ("grading_pairs", "workers")]


def beside_busy_processes(tests: list[str], count: int = 8) -> subprocess.CompletedProcess[str]:
    """Run tests while ``count`` processes take all the processor they get."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", *tests]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.long
def test_grading_tests_pass_beside_busy_processes() -> None:
    done = beside_busy_processes(GRADING, 3)
    assert done.returncode == 0, done.stdout[-3000:]


if __name__ == "__main__":
    told = beside_busy_processes(sys.argv[1:] or GRADING)
    print(told.stdout[-3000:])
    sys.exit(told.returncode)
