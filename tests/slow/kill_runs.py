"""SIGKILL at random moments of an SFT → GRPO run; each time resumed; the end compared with the uninterrupted run.

``python -m tests.slow.kill_runs --kills 50 --folder FOLDER [--seed 0]`` prints one JSON line. Everything is imported once and each
life of the run is a forked child, so that a kill costs tenths of a second instead of an import of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from algorist.config import load_recipe
from algorist.config.schema import Recipe
from algorist.runs.pipeline import run_recipe
from algorist.store.read import query
from algorist.store.stages import checkpoints
from tests.runs.test_checkpoint import metrics, rollouts

SETTINGS = [
    "model.tiny={hidden_size: 32, layers: 1, vocab_size: 300, max_position_embeddings: 256}",
    "sft.max_steps=12", "sft.save_steps=2", "sft.batch_size=4", "sft.logging_steps=3",
    "grpo.max_steps=16", "grpo.save_steps=1", "grpo.logging_steps=2", "grpo.max_completion_tokens=24", "grpo.group_size=4",
    "grpo.batch_size=8", "grpo.gradient_accumulation_steps=1", "grpo.num_iterations=2", "grpo.eval_every=6",
    "grpo.resample={when_below: 1, max_rounds: 1}", "grpo.replay={max_age: 2}", "grpo.pools={hopeless: 2}", "data.train.limit=24", "eval.samples=2", "threads=1", "grpo.learning_rate=1e-3",
    "rewards=[{name: correct}, {name: soft_overlong, params: {max_tokens: 24, cache_tokens: 2}}]",
]  # fmt: skip


def recipe(folder: Path, *more: str) -> Recipe:
    """Return the recipe of the run in ``folder/r``; with a teacher where one lies beside ``folder``, for the loss in its name."""
    for teacher in folder.parent.glob("teacher-*"):
        loss = teacher.name.partition("-")[2]
        more = (
            f"grpo.teacher={{model: '{teacher}/r', loss: {loss}}}",
            "grpo.resample=null",
            "grpo.replay=null",
        )
    return load_recipe("smoke-cpu", [*SETTINGS, f"output_dir={folder}", "run_name=r", *more]).recipe


def live(folder: Path, *more: str) -> int:
    """Start or resume the run in a forked child; return its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with (folder / "life.log").open("a", encoding="utf-8") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            run_recipe(recipe(folder, *more), resume=(folder / "r" / "config.yaml").exists())
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def moment(path: Path) -> str:
    """Say where a killed run was."""
    if (path / "grpo" / "final").is_dir():
        return "after grpo"
    if checkpoints(path / "grpo"):
        return "grpo"
    if (path / "sft" / "final").is_dir():
        return "between"
    return "sft" if checkpoints(path / "sft") else "before the first checkpoint"


def kill_until_done(folder: Path, chance: random.Random, longest_s: float) -> Counter[str]:
    """Run to the end with SIGKILLs in between; return how often the run was killed where.

    Each life may be longer than the one before, so that a machine that has become slower comes to an end, too.
    """
    folder.mkdir(parents=True)
    kills: Counter[str] = Counter()
    while True:
        child = live(folder)
        end = time.monotonic() + chance.uniform(0.0, longest_s)
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() >= end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.002)
        if done:
            if status:
                raise RuntimeError((folder / "life.log").read_text()[-4000:])
            return kills
        kills[moment(folder / "r")] += 1
        longest_s *= 1.1
        if (folder / "r" / "rollouts").is_dir() and any((folder / "r" / "rollouts").glob("*.parquet")):
            query(folder / "r", "SELECT count(*) FROM rollouts")  # readable at any moment


def outcome(path: Path) -> dict[str, Any]:
    """Return everything that must not depend on kills."""
    from safetensors.torch import load_file

    weights = {stage: load_file(path / stage / "final" / "model.safetensors") for stage in ("sft", "grpo")}
    evals = {p.name: json.loads(p.read_text())["metrics"] for p in sorted((path / "eval").glob("*.json"))}
    stages = json.loads((path / "stages.json").read_text())
    return {
        "weights": weights,
        "metrics": metrics(path),
        "rollouts": rollouts(path),
        "evals": evals,
        "stages": list(stages),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Name what differs."""
    found = [key for key in ("metrics", "rollouts", "evals", "stages") if one[key] != other[key]]
    for stage, left in one["weights"].items():
        right = other["weights"][stage]
        if left.keys() != right.keys() or not all(torch.equal(left[k], right[k]) for k in left):
            found.append(f"{stage} weights")
    return found


def main() -> None:
    """Print kills, where they fell, and what differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--teacher", choices=["sampled", "full", "top_k"], help="with a teacher, for this loss"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.teacher:
        (made := given.folder / "made").mkdir(parents=True)
        os.waitpid(live(made, "grpo.enabled=false"), 0)
        made.rename(given.folder / f"teacher-{given.teacher}")
    whole = given.folder / "whole"
    whole.mkdir(parents=True)
    began = time.monotonic()
    _, status = os.waitpid(live(whole), 0)
    if status:
        raise SystemExit((whole / "life.log").read_text()[-4000:])
    seconds = time.monotonic() - began
    expected, chance = outcome(whole / "r"), random.Random(given.seed)
    sft, grpo = (expected["weights"][stage] for stage in ("sft", "grpo"))
    assert not all(torch.equal(sft[name], grpo[name]) for name in sft), (
        "GRPO changed nothing: the comparison would be empty"
    )
    kills: Counter[str] = Counter()
    runs = 0
    different: list[str] = []
    while sum(kills.values()) < given.kills and not different:
        folder = given.folder / f"killed-{runs}"
        kills += kill_until_done(folder, chance, seconds / 2)
        different = differences(expected, outcome(folder / "r"))
        runs += 1
        if not different:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
    print(json.dumps({
        "kills": sum(kills.values()), "runs": runs, "where": dict(kills), "seconds_uninterrupted": round(seconds, 2),
        "rollouts": len(expected["rollouts"]), "metric_lines": len(expected["metrics"]), "different": different,
        "taught_steps": sum("teacher/reverse_kl" in json.dumps(line) for line in expected["metrics"]),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
