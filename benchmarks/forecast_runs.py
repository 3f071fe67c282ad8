"""Finished runs for the table of ``algorist forecast``: small models, healthy settings and bad ones, measured before and after.

    OMP_NUM_THREADS=1 python benchmarks/forecast_runs.py --out FOLDER [--runs 80] [--minutes 60]   # a folder continues

Tiny models (0.1 to 0.5 M parameters) learn four generated tasks by SFT; the checkpoints on the way are the starts: from nothing right to
most. A run draws, with a seed, a task, a start, a length and settings of GRPO; a third of the settings is bad on purpose (rates that are
far too large or small, rewards that are noise, form alone or against correctness, a limit that cuts). Before a run ``forecast`` measures
it; its gain is that of its result.json: one of three samples on 160 held-out problems, paired. FOLDER/runs.jsonl gets a row each, FOLDER/raw the
single completions' numbers.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import shutil
import sys
import time
from pathlib import Path

from algorist.config import load_recipe
from algorist.errors import AlgoristError
from algorist.extensions.forecast.measure import measure
from algorist.extensions.forecast.table import row_of
from algorist.runs.draft import Draft
from algorist.runs.outcome import Outcome
from algorist.runs.pipeline import run_recipe
from algorist.runs.plan import make_plan
from algorist.store.run_log import Quiet

SMALL = "model.tiny={{{{vocab_size: {}, hidden_size: 64, layers: 2, heads: 4, kv_heads: 2}}}}"
TASKS: dict[str, tuple[str, tuple[str, ...], int, int]] = {
    "sums": (
        "quickstart",
        (
            "data.train={{name: local, path: {f}/train.jsonl}}",
            "data.sft={{name: local, path: {f}/sft.jsonl}}",
            "data.eval={{name: local, path: {f}/test.jsonl}}",
            "grpo.max_completion_tokens=40",
            SMALL.format(300),
        ),
        600,
        75,
    ),
    "countdown": (
        "countdown",
        ("data.eval.params.count=160", "sft.batch_size=16", SMALL.format(300)),
        600,
        75,
    ),
    "easy": (
        "quickstart",
        (
            "data.train.params.steps=[2]",
            "data.sft.params.steps=[2]",
            "data.eval.params.steps=[2]",
            "data.sft.params.careless=0.4",
            "data.eval.params.count=160",
            SMALL.format(600),
        ),
        900,
        150,
    ),
    "arithmetic": ("quickstart", ("data.eval.params.count=160", SMALL.format(600)), 1200, 200),
}
"""Task → recipe, overrides, steps of SFT, steps between two starts."""
HEALTHY = {
    "plain": (),
    "slower": ("grpo.learning_rate=1e-4",),
    "faster": ("grpo.learning_rate=1e-3",),
    "cooler": ("grpo.temperature=0.7",),
    "hotter": ("grpo.temperature=1.2",),
    "groups of 4": ("grpo.group_size=4",),
    "groups of 16": ("grpo.group_size=16",),
    "correct alone": ("rewards=[correct]",),
    "dapo": ("grpo.loss=dapo", "grpo.advantage=group_normalized"),
    "constant": ("grpo.lr_scheduler=constant_with_warmup",),
    "teacher": ("grpo.teacher={{model: {best}, loss: full}}",),
}
BAD = {
    "rate 1e-2": ("grpo.learning_rate=1e-2",),
    "rate 4e-3": ("grpo.learning_rate=4e-3",),
    "rate 1e-6": ("grpo.learning_rate=1e-6",),
    "random": ("rewards=[{{name: random}}]", "grpo.learning_rate=1e-3"),
    "drowned": (
        "rewards=[{{name: correct, weight: 0.1}}, {{name: random, weight: 1.0}}]",
        "grpo.learning_rate=1e-3",
    ),
    "form": ("rewards=[well_formed]", "grpo.learning_rate=1e-3"),
    "against": ("rewards=[{{name: correct, weight: -1.0}}]",),
    "short": (
        "rewards=[{{name: target_length, params: {{target_tokens: 8, alpha: 0.02}}}}]",
        "grpo.learning_rate=1e-3",
    ),
    "cut": ("grpo.max_completion_tokens={cut}",),
    "bonus": ("grpo.entropy_bonus=0.3",),
}
EARLY = 25
"""Runs that start anywhere, with the quickstart's rate; most of them gained little. The others start later, take longer and larger steps."""
SEALED = 46
"""First of the runs that were made after the form of the fit was frozen; they only test it."""
LENGTHS, LONGER = (20, 30, 40, 60), (30, 45, 60, 90)
RATES = (3e-4, 6e-4, 1e-3)
GRPO = (
    "sft.enabled=false",
    "eval.baseline=true",
    "eval.samples=3",
    "eval.ks=[1,3]",
    "grpo.batch_size=64",
    "grpo.save_steps=1000",
    "threads=1",
)


def sums(path: Path, count: int, seed: int, *, test: bool = False, careless: float = 0.0) -> None:
    """Write sums and differences as JSONL; no pair of numbers of the test file is in the others, a careless solution is off by one."""
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        a, b, sign = rng.randint(1, 30), rng.randint(1, 30), rng.choice("+-")
        if ((31 * a + 7 * b) % 5 == 0) == test:
            value = a + b if sign == "+" else a - b
            slip = rng.choice((-1, 1)) if rng.random() < careless else 0
            text = f"{a} {sign} {b}"
            rows.append(
                {"question": f"{text} = ?", "answer": str(value), "solution": f"{text} = {value + slip}"}
            )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def starts(folder: Path, task: str) -> list[Path]:
    """Return the checkpoints of a task's SFT, trained where they are not there yet."""
    recipe, overrides, steps, each = TASKS[task]
    run = folder / "bases" / task
    if not (run / "sft" / "final").is_dir():
        shutil.rmtree(run, ignore_errors=True)
        lines = [*(line.format(f=folder) for line in overrides), "grpo.enabled=false", "eval.enabled=false"]
        lines += [f"sft.max_steps={steps}", f"sft.save_steps={each}", "sft.save_total_limit=100"]
        lines += [f"output_dir={run.parent}", f"run_name={task}", "threads=1"]
        run_recipe(load_recipe(recipe, lines).recipe, display=Quiet())
    return [run / "sft" / f"checkpoint-{step}" for step in range(each, steps + 1, each)]


def draw(number: int, folder: Path) -> tuple[str, str, str, list[str]]:
    """Return the name, the task, the recipe and the overrides of a run."""
    rng = random.Random(f"forecast/{number}")
    task = rng.choice(list(TASKS))
    recipe, overrides, steps, each = TASKS[task]
    early = number < EARLY
    first, lengths = (each, LENGTHS) if early else (steps // 2, LONGER)
    start, length = rng.randrange(first, steps + 1, each), rng.choice(lengths)
    kinds = HEALTHY if rng.random() < 0.65 else BAD
    kind = "plain" if kinds is HEALTHY and rng.random() < 0.3 else rng.choice(list(kinds))
    of_sft = folder / "bases" / task / "sft"
    values = {"best": of_sft / f"checkpoint-{steps}", "cut": rng.choice((8, 12, 20)), "f": folder}
    rate = () if early else (f"grpo.learning_rate={rng.choice(RATES)}",)
    lines = [line.format(**values) for line in (*overrides, *GRPO, *rate, *kinds[kind])]
    lines += [f"model.name={of_sft / f'checkpoint-{start}'}", f"grpo.max_steps={length}", f"seed={number}"]
    return f"{number:03d} {task} {start} {kind}, {length} steps", task, recipe, lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=80)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--match", default="", help="a regular expression: only runs whose name it is in")
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    folder, ends = options.out.resolve(), time.monotonic() + 60 * options.minutes
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    table = folder / "runs.jsonl"
    done = {json.loads(line)["name"] for line in table.read_text().splitlines()} if table.is_file() else set()
    sums(folder / "train.jsonl", 1500, 1)
    sums(folder / "sft.jsonl", 4000, 2, careless=0.5)
    sums(folder / "test.jsonl", 160, 3, test=True)
    for number in range(options.first, options.first + options.runs):
        name, task, recipe, lines = draw(number, folder)
        if name in done or not re.search(options.match, name) or time.monotonic() > ends:
            continue
        starts(folder, task)
        began = time.monotonic()
        shutil.rmtree(folder / "run", ignore_errors=True)
        try:
            loaded = load_recipe(recipe, [*lines, f"output_dir={folder}", "run_name=run"]).recipe
            before = measure(make_plan(Draft.of(loaded, in_folder=False), say=lambda _: None))
            measured_s = time.monotonic() - began
            Outcome.of(run_recipe(loaded, display=Quiet()))
        except AlgoristError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        row = row_of(name, before, folder / "run") | {"sealed": number >= SEALED}
        raw = {**row, "moved": before.moved, "overrides": lines, "measured_s": measured_s}
        (folder / "raw" / f"{number:03d}.json").write_text(json.dumps(raw))
        with table.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name}: {measured_s:.0f} + {time.monotonic() - began - measured_s:.0f} s", flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
