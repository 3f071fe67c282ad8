"""What keeping freed memory saves on the CPU: a recipe run in turns with it and without, each run in a process of its own.

    python benchmarks/host_memory.py smoke-cpu
    python benchmarks/host_memory.py smollm2-demo sft.max_steps=20 eval.enabled=false --pairs 5 --save

Prints seconds per logged step and stage, system time, page faults and peak memory, and checks that the logged losses and rewards
are the same to the last digit. Without: ``GLIBC_TUNABLES`` is set (to its default), which leaves the allocator to the user.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import median_with_interval, ratio_with_interval, save_json
from memory_plan import seconds_per_step

WITHOUT = {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}
NUMBERS = ("loss", "reward", "grad_norm")


def run(recipe: str, overrides: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run the recipe; return seconds, page faults, peak memory, seconds per step of each stage and the logged numbers."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        command = [
            sys.executable, "-m", "algorist", "run", recipe, *overrides, f"output_dir={folder}", "run_name=r",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            log.seek(0)
            raise SystemExit(f"{' '.join(command)} failed: {log.read()[-2000:]}")
        made = Path(folder) / "r"
        lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
        stages = [
            s for s in ("sft", "grpo") if len({line["step"] for line in lines if line["stage"] == s}) > 1
        ]
        steps = {stage: seconds_per_step(made, stage) for stage in stages}
    return {
        "seconds_per_step": steps,
        "processor_s": usage.ru_utime + usage.ru_stime,
        "system_s": usage.ru_stime,
        "page_faults": usage.ru_minflt,
        "peak_gb": usage.ru_maxrss * 1024 / 1e9,
        "numbers": [{name: line.get(name) for name in NUMBERS} for line in lines],
    }


def main() -> None:
    """Run the pairs, print the table, save it if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/baselines/NAME.json")
    given = parser.parse_args()
    ways: dict[str, dict[str, str]] = {"kept": {}, "given_back": WITHOUT}
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for turn in range(given.pairs):
        for way in list(ways)[:: -1 if turn % 2 else 1]:
            runs[way].append(run(given.recipe, given.overrides, ways[way]))
    numbers = [found.pop("numbers") for way in ways for found in runs[way]]
    if any(found != numbers[0] for found in numbers):
        raise SystemExit("the runs logged different numbers")
    for way, found in runs.items():
        middle = {
            name: median_with_interval([r[name] for r in found])["median"]
            for name in found[0]
            if name != "seconds_per_step"
        }
        print(f"{way:10} " + "  ".join(f"{name} {value:.4g}" for name, value in middle.items()))
    ratios = {
        stage: ratio_with_interval(*([r["seconds_per_step"][stage] for r in runs[way]] for way in ways))
        for stage in runs["kept"][0]["seconds_per_step"]
    }
    ratios["processor time of the run"] = ratio_with_interval(
        *([r["processor_s"] for r in runs[way]] for way in ways)
    )
    for name, ratio in ratios.items():
        print(
            f"{name}: {ratio['ratio']:.2f}× the time [{ratio['low']:.2f}, {ratio['high']:.2f}] when freed memory is kept"
        )
    if given.save:
        named = [
            f"{key}={Path(value).name or value}"
            for key, _, value in (o.partition("=") for o in given.overrides)
        ]
        settings = {"recipe": given.recipe, "overrides": named}
        print(save_json(given.save, {"settings": settings, "runs": runs, "ratios": ratios}))


if __name__ == "__main__":
    main()
