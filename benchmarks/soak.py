"""A long GRPO run of the tiny model with a reward that leaks, raises, hangs and is stopped: does anything grow?

    python benchmarks/soak.py --steps 300          # about 5 minutes on an idle core
    python benchmarks/soak.py --steps 2000 --save soak

The run is a process of its own, looked at from outside once a second: memory of the run and of its children, open files,
number of processes. Growth is the mean of the last quarter over that of the second; the exit status is 1 where it is above
the bounds below or where a process outlives the run.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
from measure import environment, save_json

REWARD = """
import random, time
kept = []

def faulty(completion):
    kept.append(bytearray(200_000))  # leaks 0.2 MB a completion, until its process is stopped
    draw = random.random()
    if draw < 0.002:
        time.sleep(3600)
    if draw < 0.01:
        raise ValueError("on purpose")
    return float(len(completion) % 7)
"""
BOUNDS = {"run_mb": 40.0, "files": 8.0, "processes": 1.0}
"""By how much the mean of the last quarter may exceed that of the second quarter."""


WARM_STEPS = 20
"""Steps before the looks count: imports, the first checkpoint and the caches of torch come before."""


def steps_done(folder: Path) -> int:
    """Return how many steps the run has logged."""
    path = folder / "soak" / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def looked_at(run: psutil.Process, source: random.Random) -> dict[str, float] | None:
    """Return one look at the run and its children; now and then stop a child for a moment, as a busy machine does."""
    try:
        children = run.children(recursive=True)
        if children and source.random() < 0.02:
            child = source.choice(children)
            child.send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            child.send_signal(signal.SIGCONT)
        return {
            "run_mb": run.memory_info().rss / 2**20,
            "children_mb": sum(c.memory_info().rss for c in children if c.is_running()) / 2**20,
            "files": float(run.num_fds()),
            "processes": float(len(children)),
        }
    except psutil.Error:
        return None


def main() -> int:
    """Run, look, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save", default="", help="name of the result; nothing is written without it")
    options = parser.parse_args()
    looks: list[dict[str, float]] = []
    children: set[psutil.Process] = set()
    with tempfile.TemporaryDirectory() as folder:
        reward = Path(folder) / "faulty.py"
        reward.write_text(REWARD)
        command = [
            sys.executable, "-m", "algorist", "run", "smoke-cpu", "--only", "grpo", f"output_dir={folder}", "run_name=soak", "threads=1",
            f"grpo.max_steps={options.steps}", "grpo.save_steps=50", "eval.enabled=false",
            f"rewards=[correct, {{name: {reward}:faulty, timeout_s: 2}}]",
        ]  # fmt: skip
        with (Path(folder) / "out.txt").open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
            source, run = random.Random(1), psutil.Process(process.pid)
            began = time.monotonic()
            while process.poll() is None:
                look = looked_at(run, source)
                if look and steps_done(Path(folder)) >= WARM_STEPS:
                    looks.append(look)
                    children |= set(run.children(recursive=True)) if run.is_running() else set()
                time.sleep(1.0)
        outlived = psutil.wait_procs(children, timeout=20)[1]
        said = (Path(folder) / "out.txt").read_text()
    result: dict[str, Any] = {
        "steps": options.steps,
        "seconds": time.monotonic() - began,
        "looks": len(looks),
        "exit": process.returncode,
    }
    quarter = max(1, len(looks) // 4)
    for name in (*BOUNDS, "children_mb"):
        result[name] = {
            "second_quarter": mean(look[name] for look in looks[quarter : 2 * quarter]),
            "last_quarter": mean(look[name] for look in looks[-quarter:]),
            "most": max(look[name] for look in looks),
        }
    grown = [
        n for n, bound in BOUNDS.items() if result[n]["last_quarter"] - result[n]["second_quarter"] > bound
    ]
    result |= {"grown": grown, "outlived": len(outlived), "failures_told": "failed on" in said}
    print(result, environment()["libraries"])
    if options.save:
        print(save_json(options.save, result))
    return int(bool(grown or outlived or process.returncode or not result["failures_told"]))


if __name__ == "__main__":
    sys.exit(main())
