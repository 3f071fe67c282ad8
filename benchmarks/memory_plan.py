"""What preflight foretells against what a real run then takes: peak memory and seconds per step.

Three model sizes, SFT and GRPO, all weights and LoRA; each in processes of their own:
``python benchmarks/memory_plan.py [--save]``. Prints one line per case and, with ``--save``, writes
``baselines/memory-plan.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import BASELINES, save_json

SHAPES = {
    "0.4 M": "{hidden_size: 96, layers: 3, vocab_size: 700}",
    "5 M": "{hidden_size: 256, layers: 6, vocab_size: 700}",
    "15 M": "{hidden_size: 384, layers: 8, vocab_size: 700}",
}
STEPS = 10


def call(arguments: list[str]) -> tuple[str, int]:
    """Run the command line; return its output and its peak memory in bytes."""
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, "-m", "algorist", *arguments]
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        _, status, usage = os.wait4(process.pid, 0)
        output.seek(0)
        text = output.read().decode()
        if status:
            raise SystemExit(f"{' '.join(command)} failed: {text[-2000:]}")
        return text, usage.ru_maxrss * 1024


def seconds_per_step(run: Path, stage: str) -> float:
    """Return the median over the logged steps of the seconds that one took."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if line["stage"] == stage]
    pairs = [(a, b) for a, b in itertools.pairwise(rows) if b["step"] > a["step"]]
    return statistics.median((b["time"] - a["time"]) / (b["step"] - a["step"]) for a, b in pairs)


def case(shape: str, stage: str, lora: str) -> dict[str, Any]:
    """Foretell and run one case."""
    other = {"sft": "grpo", "grpo": "sft"}[stage]
    settings = [
        f"model.tiny={SHAPES[shape]}", f"model.lora={lora}", f"{other}.enabled=false", "grpo.batch_size=32",
        f"{stage}.max_steps={STEPS}", f"{stage}.logging_steps=1", f"{stage}.save_steps=100000", "eval.enabled=false",
        # Rows without signal are computed in the trial; from scratch all of them are.
        "grpo.skip_zero_advantage=false",
    ]  # fmt: skip
    told = json.loads(call(["preflight", "quickstart", *settings, "--problems", "8", "--json"])[0])[stage]
    with tempfile.TemporaryDirectory() as folder:
        _, peak = call(["run", "quickstart", *settings, f"output_dir={folder}", "run_name=r"])
        seconds = seconds_per_step(Path(folder) / "r", stage)
    return {
        "model": shape,
        "stage": stage,
        "lora": lora != "null",
        "planned_bytes": told["memory"]["peak"],
        "trial_bytes": told["memory"]["measured_peak"],
        "run_bytes": peak,
        "memory_ratio": told["memory"]["peak"] / peak,
        "planned_seconds": told["seconds_per_step"],
        "run_seconds": seconds,
        "time_ratio": told["seconds_per_step"] / seconds,
    }


def main() -> None:
    """Print and save the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    rows = []
    for shape in SHAPES:
        for stage in ("sft", "grpo"):
            for lora in ("null", "{rank: 16}"):
                row = case(shape, stage, lora)
                rows.append(row)
                print(
                    f"{shape:>6} {stage:4} {'LoRA' if row['lora'] else 'full'}: planned {row['planned_bytes'] / 1e9:.2f} GB, run "
                    f"{row['run_bytes'] / 1e9:.2f} GB ({row['memory_ratio']:.2f}); {row['planned_seconds']:.3f} s per step, run "
                    f"{row['run_seconds']:.3f} s ({row['time_ratio']:.2f})",
                    flush=True,
                )
    if given.save:
        save_json("memory-plan", {"cases": rows}, BASELINES)


if __name__ == "__main__":
    main()
