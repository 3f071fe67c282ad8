"""A reward that leaks, prints, starts threads and is stopped: the run's own files are those of the run without these faults."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from algorist.models import products
from tests.runs.test_checkpoint import rollouts, same

CLEAN = "def paid(completion):\n    return float(len(completion) % 7)\n"
FAULTY = """
import os, sys, threading, time
kept = []

def paid(completion):
    kept.append(bytearray(5_000_000))  # its process is over its memory again and again
    print("noise" * 1000, flush=True)
    os.write(2, b"\\x1b]0;title\\x07" * 100)
    threading.Thread(target=time.sleep, args=(600,), daemon=len(kept) % 2 == 0).start()
    open(os.devnull)  # never closed
    return float(len(completion) % 7)
"""


def run(folder: Path, reward: str, chance: random.Random | None = None) -> Path:
    """Do 12 GRPO steps; with ``chance``, stop a child process for a second now and then."""
    folder.mkdir()
    (folder / "own.py").write_text(reward)
    command = [
        sys.executable, "-m", "algorist", "run", "smoke-cpu", "--only", "grpo", f"output_dir={folder}", "run_name=r", "threads=1", "grpo.max_steps=12",
        "eval.enabled=false", f"rewards=[correct, {{name: {folder}/own.py:paid, timeout_s: 5}}]",
    ]  # fmt: skip
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {products.BY_HAND: "torch"}
        )
        seen: set[psutil.Process] = set()
        end = time.monotonic() + 600
        while process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True) if chance else []
            seen |= set(children)
            if chance and children and chance.random() < 0.2:
                victim = chance.choice(children)
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.send_signal(signal.SIGSTOP)
                    time.sleep(1.0)
                    victim.send_signal(signal.SIGCONT)
            time.sleep(0.2)
            if time.monotonic() > end:
                process.kill()
    assert process.returncode == 0, (folder / "out.txt").read_text()
    assert not psutil.wait_procs(seen, timeout=20)[1]  # nothing outlives the run
    return folder / "r"


@pytest.mark.long
@pytest.mark.slow
def test_a_reward_that_misbehaves_leaves_the_run_as_it_would_have_been(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", CLEAN)
    troubled = run(tmp_path / "troubled", FAULTY, random.Random(3))
    same(plain, troubled, "grpo")
    assert len(rollouts(plain)) > 0
    assert (troubled / "training.log").read_text().count("noise") < 10 * len(
        rollouts(troubled)
    )  # 1,000 a call were printed
    assert (
        "\x1b]0;" not in (troubled / "training.log").read_text() + (troubled.parent / "out.txt").read_text()
    )
