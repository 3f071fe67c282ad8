"""Which tests notice a wrong loss, advantage or step: one line of the algorithm is changed at a time.

``python -m tests.slow.mutations [--learning] [NAME …]`` prints one JSON line per mutation. Each is made in a copy of the package, and
the tests of the algorithm run on it until one fails; ``--learning`` runs the quickstart's learning test instead (minutes each).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = [
    "tests/unit/objectives/test_reference.py",
    "tests/unit/objectives/test_trl.py",
    "tests/unit/training/test_step_equality.py",
    "tests/unit/training/test_grpo.py",
]
LEARNING = ["tests/slow/test_runs.py::test_the_whole_job_learns"]

ADVANTAGES, LOSSES, REDUCTIONS, RATIOS, KL, OBJECTIVE = (
    "objectives/advantages.py",
    "objectives/losses.py",
    "objectives/reductions.py",
    "objectives/ratios.py",
    "objectives/ratios.py",
    "training/objective.py",
)
MUTATIONS = {
    "advantage: sign": (
        ADVANTAGES,
        "centred_PG = rewards_PG - rewards_PG.nanmean(-1, keepdim=True)",
        "centred_PG = rewards_PG.nanmean(-1, keepdim=True) - rewards_PG",
    ),
    "advantage: biased deviation": (ADVANTAGES, "(squares / (count - 1).clamp(min=1))", "(squares / count.clamp(min=1))"),
    "advantage: not divided by the deviation": (
        ADVANTAGES,
        "return group_centered(rewards_PG) / (deviation(rewards_PG).nan_to_num(nan=0.0) + eps)",
        "return group_centered(rewards_PG)",
    ),
    "loss: sign": (LOSSES, "return -free.minimum(clipped),", "return free.minimum(clipped),"),
    "loss: the greater of the two": (LOSSES, "-free.minimum(clipped)", "-free.maximum(clipped)"),
    "loss: clip bounds exchanged": (LOSSES, "ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio.clamp(1 - clip_high, 1 + clip_low)"),
    "loss: penalty with the wrong sign": (LOSSES, "per_token + beta * kl", "per_token - beta * kl"),
    "loss: penalty without the ratio": (LOSSES, "        if unbiased_kl:", "        if False:"),
    "weights: denominator of token-mean": (REDUCTIONS, "if denominator is None else denominator)", "if denominator is None else 2 * denominator)"),
    "weights: completions not counted by Dr. GRPO": (REDUCTIONS, "ones / (count * denominator)", "ones / denominator"),
    "weights: completions not counted": (REDUCTIONS, "clamp(min=1) * count)", "clamp(min=1))"),
    "ratio: sign": (RATIOS, "difference = log_probs - old_log_probs.detach()", "difference = old_log_probs.detach() - log_probs"),
    "ratio: gradient into the sampler's": (RATIOS, "log_probs - old_log_probs.detach()", "log_probs - old_log_probs"),
    "ratio: sequence without its length": (RATIOS, "(total / mask.sum(-1).clamp(min=1)).exp()", "total.exp()"),
    "kl: k3 without the 1": (KL, "difference.expm1() - difference", "difference.exp() - difference"),
    "step: only good completions are computed": (OBJECTIVE, "(batch.advantages != 0)", "(batch.advantages > 0)"),
    "step: micro-batches added, not averaged": (OBJECTIVE, " / len(parts) for part", " for part"),
    "step: no correction for the sampler": (OBJECTIVE, "sampler_weights=policy_weights", "sampler_weights=None"),
    "step: rollouts in another order": (OBJECTIVE, "order = torch.randperm(rows).tolist()", "order = list(range(rows))"),
}  # fmt: skip


def caught_by(
    name: str,
    tests: Sequence[str],
    changes: Mapping[str, tuple[str, str, str]] = MUTATIONS,
    python: Sequence[str] = (sys.executable,),
) -> str:
    """Return the first test that fails with a mutation of ``changes``, or an empty text where all pass.

    Raises:
        ValueError: The line to change is not there exactly once.
        RuntimeError: The tests could not be run.
    """
    file, old, new = changes[name]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy)
        path = copy / "algorist" / file
        text = path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise ValueError(f"{name}: {text.count(old)} times in {file}, expected once: {old}")
        path.write_text(text.replace(old, new), encoding="utf-8")
        done = subprocess.run(
            [*python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "", *tests],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) or (done.returncode == 1 and failed is None):
        raise RuntimeError(
            f"{name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return failed.group(1) if failed else ""


def main() -> None:
    """Print which test notices each mutation; exit 1 where one goes unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {'; '.join(MUTATIONS)}")
    parser.add_argument("--learning", action="store_true", help="run the quickstart's learning test instead")
    arguments = parser.parse_args()
    unnoticed = 0
    for name in arguments.names or MUTATIONS:
        test = caught_by(name, LEARNING if arguments.learning else TESTS)
        unnoticed += not test
        print(json.dumps({"mutation": name, "caught_by": test or None}), flush=True)
    raise SystemExit(1 if unnoticed else 0)


if __name__ == "__main__":
    main()
