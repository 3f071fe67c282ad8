"""A whole GRPO step of another commit against this one, in turns, by processor time: ``python benchmarks/old_new.py 42b2b16 --size small``.

Both sides do the step of ``equal.py``, so the work is equal. Each tree runs in a process of its own, one thread; the other commit
is a git worktree in a temporary folder, and must have the functions that ``equal.py`` calls. Rollouts are by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKER = """
import json, sys, time
import equal
case = equal.USUAL | {"model": sys.argv[1], "tokens": int(sys.argv[2])}
take = equal.build_algorist(case)
take()
print("ready", flush=True)
for line in sys.stdin:
    began = time.process_time()
    count = take()
    print(json.dumps([count, time.process_time() - began, take.parts["sampling"]]), flush=True)
"""


def start(tree: Path, size: str, tokens: int) -> subprocess.Popen[str]:
    """Start the worker of one tree."""
    environment = {**os.environ, "PYTHONPATH": f"{tree}/src:{ROOT}/benchmarks", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, size, str(tokens)],
        cwd=ROOT / "benchmarks",
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def answer(worker: subprocess.Popen[str]) -> list[float]:
    """Return what a worker measured; what the libraries print is passed over."""
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.startswith("ready"):
            return []
        if line.startswith("["):
            found: list[float] = json.loads(line)
            return found
    raise SystemExit("a worker ended before it answered")


def ask(worker: subprocess.Popen[str], seed: int) -> list[float]:
    """Return (tokens, seconds of the step, seconds of its rollouts) of one step."""
    assert worker.stdin is not None
    worker.stdin.write(f"{seed}\n")
    worker.stdin.flush()
    return answer(worker)


def median_interval(values: list[float]) -> str:
    """Return the median with its 95 % bootstrap interval."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(5000))
    return f"{statistics.median(values):.3f} [{medians[125]:.3f}, {medians[4875]:.3f}]"


def main() -> None:
    """Print old / new per turn, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--size", default="small", help="smollm2, or a size of models.py")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=21)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", old, arguments.commit], cwd=ROOT, check=True
        )
        try:
            workers = [start(tree, arguments.size, arguments.tokens) for tree in (old, ROOT)]
            for worker in workers:
                answer(worker)
            steps, rollouts = [], []
            for turn in range(1, arguments.turns + 1):
                pair = {i: ask(workers[i], turn) for i in ((0, 1) if turn % 2 else (1, 0))}
                (count, step, rollout), (new_count, new_step, new_rollout) = pair[0], pair[1]
                steps.append(step / new_step * new_count / count)
                rollouts.append(rollout / new_rollout)
                print(
                    f"turn {turn}: tokens {count:.0f} and {new_count:.0f}, step {steps[-1]:.3f}", flush=True
                )
            for worker in workers:
                worker.terminate()
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", old], cwd=ROOT, check=True)
    print(
        f"{arguments.size}, old / new processor time: step {median_interval(steps)}, rollouts {median_interval(rollouts)}"
    )


if __name__ == "__main__":
    main()
