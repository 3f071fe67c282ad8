"""How much the store costs: writing one quickstart step, and queries over a million rollouts.

    python benchmarks/store.py                # 1 000 000 rollouts, about 1 minute
    python benchmarks/store.py --rows 100000

Prints one JSON object. ``write.step_ms`` is what 128 rollouts of a quickstart step cost, flushes included;
``--step-seconds`` (the measured length of a step) turns it into a share.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow

from algorist.store.read import query, rollouts
from algorist.store.write import RolloutWriter

ROWS_PER_STEP, GROUP_SIZE, PROBLEMS = 128, 8, 4000
REASONS = ("equal_number", "different", "no_answer", "equal_string", "unparseable_answer", "timeout")


def step_rows(step: int, numbers: random.Random) -> list[dict[str, Any]]:
    """Return the rollouts of one step: 16 problems, 8 completions each, about 300 characters."""
    rows = []
    for index in range(ROWS_PER_STEP):
        problem = (step * (ROWS_PER_STEP // GROUP_SIZE) + index // GROUP_SIZE) % PROBLEMS
        reason = numbers.choices(REASONS, (600, 300, 60, 30, 9, 1))[0]
        correct = reason.startswith("equal")
        working = " ".join(str(numbers.randrange(10_000)) for _ in range(45))
        rows.append(
            {
                "step": step,
                "problem_id": f"train-{problem}",
                "group": index // GROUP_SIZE,
                "prompt": f"Tom has {problem} apples and buys {problem % 7} more. How many does he have?\n",
                "completion": f"<reasoning>{working}</reasoning><answer>{problem}</answer>",
                "prompt_tokens": 30,
                "completion_tokens": 80,
                "sampler_log_prob_sum": -numbers.random() * 50,
                "rewards": {"correct": float(correct), "well_formed": 1.0},
                "reward": 0.2 + correct,
                "advantage": numbers.random(),
                "correct": correct,
                "reason": reason,
                "extracted": str(problem),
                "gold": str(problem),
                "truncated": False,
                "seconds": 1.0,
            }
        )
    return rows


def timed(action: Callable[[], Any], repeats: int = 5) -> dict[str, Any]:
    """Return median and worst seconds of ``repeats`` calls, the first (cold) one apart, and the rows returned."""
    seconds, found = [], []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        found = action()
        seconds.append(time.perf_counter() - began)
    rest = seconds[1:]
    return {
        "first_s": round(seconds[0], 3),
        "median_s": round(statistics.median(rest), 3),
        "worst_s": round(max(rest), 3),
        "rows": len(found),
    }


def main() -> None:
    """Run the benchmark and print its result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--step-seconds", type=float, help="seconds of a training step, for the share")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder when left out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        run, numbers = Path(temporary), random.Random(0)
        steps = options.rows // ROWS_PER_STEP
        writing = 0.0
        with RolloutWriter(run / "rollouts") as writer:
            for step in range(steps):
                rows = step_rows(step, numbers)
                began = time.perf_counter()
                writer.write(rows)
                if step % 20 == 19:
                    writer.flush()
                writing += time.perf_counter() - began
        parts = sorted((run / "rollouts").iterdir())
        cost = 1000 * writing / steps
        result = {
            "rows": steps * ROWS_PER_STEP,
            "parts": len(parts),
            "megabytes": round(sum(p.stat().st_size for p in parts) / 1e6, 1),
            "write": {"step_ms": round(cost, 2)},
            "query": {
                "step": timed(lambda: rollouts(run, step=steps // 2)),
                "whole_step": timed(lambda: rollouts(run, step=steps // 2, limit=None)),
                "problem": timed(lambda: rollouts(run, problem_id="train-1234", limit=500)),
                "reason": timed(lambda: rollouts(run, reason="timeout")),
                "reason_sorted": timed(lambda: rollouts(run, reason="no_answer", sort="-advantage")),
                "text": timed(lambda: rollouts(run, contains="1234 4321")),
                "sql_by_step": timed(
                    lambda: query(
                        run, "SELECT step, avg(reward), avg(rewards['correct']) FROM rollouts GROUP BY 1"
                    )
                ),
            },
            "versions": {
                "python": platform.python_version(),
                "duckdb": duckdb.__version__,
                "pyarrow": pyarrow.__version__,
            },
        }
        if options.step_seconds:
            result["write"]["share_of_step"] = round(cost / 1000 / options.step_seconds, 5)
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
