"""Does `algorist race` name the route that wins? Full runs of every route of ten small tasks, at equal processor seconds, then the races.

    OMP_NUM_THREADS=1 python benchmarks/race.py full --out FOLDER [--open] [--minutes 60]   # a folder continues
    OMP_NUM_THREADS=1 python benchmarks/race.py races --out FOLDER [--open]
    OMP_NUM_THREADS=1 python benchmarks/race.py table --out FOLDER [--open]

Tiny models (0.1 to 0.2 M parameters), from scratch or from a checkpoint of a short SFT, on sums, word problems and countdown; the tasks differ
in where they start, in number and quality of their demonstrations, in teacher and tool. A full run of the recipe's own route says what a step
of each stage takes; the other routes get as many steps as take the same seconds. The metric is pass@1, one of four samples at temperature 1 on
200 problems of the test split.

Defined before any run was looked at: the *winner* of a task is the route whose full run has the highest pass@1, and every route within the
noise of it: the paired 95 % interval of the difference over problems holds 0, or the difference is below two points. A race is *right* if the
route that it names as ahead is a winner; how often it adds that it cannot tell some apart is counted beside. The five tasks with the largest
SHA-256 of their name are *sealed*: method and constants were settled on the others.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shutil
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from algorist.config import load_recipe
from algorist.evaluation.artifact import read_artifact
from algorist.evaluation.compare import paired_metrics
from algorist.extensions.race.race_command import race
from algorist.extensions.race.routes import routes_of
from algorist.runs.pipeline import run_recipe
from algorist.store.run_log import Quiet
from algorist.system import processor_seconds

SMALL = "model.tiny={{vocab_size: {}, hidden_size: 64, layers: 2, heads: 4, kv_heads: 2}}"
SUMS = (
    "data.train={name: local, path: {f}/train.jsonl}",
    "data.sft={name: local, path: {f}/{demos}.jsonl}",
    "data.eval={name: local, path: {f}/test.jsonl, split: train}",
    "grpo.max_completion_tokens=30",
    SMALL.format(300),
)
COUNTDOWN = ("data.eval.params.count=160", "sft.batch_size=16", SMALL.format(300))
EASY = (
    *(f"data.{part}.params.steps=[2]" for part in ("train", "sft", "eval")),
    "data.eval.params.count=200",
    SMALL.format(600),
)
COMMON = (
    *("eval.samples=4", "eval.ks=[1,4]", "eval.baseline=false", "threads=1"),
    *("grpo.batch_size=64", "grpo.save_steps=100000", "sft.save_steps=100000"),
    "grpo.learning_rate=1e-3",
)
BASES = {
    "sums": ("quickstart", SUMS, "careless", 600, 150),
    "countdown": ("countdown", COUNTDOWN, "", 300, 150),
    "teacher": ("quickstart", SUMS, "right", 300, 300),
}
"""Start → recipe, overrides, demonstrations, steps of SFT, steps between checkpoints."""
TASKS: dict[str, tuple[str, tuple[str, ...], str, str, int, int]] = {
    "sums from scratch, half of the demonstrations wrong": ("quickstart", SUMS, "careless", "", 300, 30),
    "sums from scratch, right demonstrations": ("quickstart", SUMS, "right", "", 240, 25),
    "sums from step 150, right demonstrations": ("quickstart", SUMS, "right", "sums/150", 150, 20),
    "sums from step 450, most demonstrations wrong": ("quickstart", SUMS, "wrong", "sums/450", 150, 20),
    "sums from step 450, sixty right demonstrations": ("quickstart", SUMS, "sixty", "sums/450", 150, 20),
    "larger sums from step 600, two hundred demonstrations": ("quickstart", SUMS, "larger", "sums/600", 150, 20),
    "sums from step 300, with a teacher": (
        "quickstart",
        (*SUMS, "grpo.teacher={model: {f}/bases/teacher/sft/final, loss: full}"),
        "careless",
        "sums/300",
        150,
        20,
    ),
    "word problems from scratch, with a calculator": ("quickstart-tool", EASY, "", "", 240, 20),
    "countdown from step 300, as it is shipped": ("countdown", COUNTDOWN, "", "countdown/300", 150, 20),
    "countdown from step 150, right demonstrations": (
        "countdown",
        (*COUNTDOWN, "data.sft.params.careless=0"),
        "",
        "countdown/150",
        150,
        20,
    ),
}  # fmt: skip
"""Name → recipe, overrides, demonstrations, start, steps of SFT and of GRPO that the recipe plans."""
SEALED = set(sorted(TASKS, key=lambda name: sha256(name.encode()).hexdigest())[len(TASKS) // 2 :])
POINTS = 0.02
"""Difference below which two full runs are as good as each other."""


NAMES, THINGS = (
    "Tom Mia Ben Ana Leo Eva Sam Zoe".split(),
    "apples books coins cards stones pens shells eggs".split(),
)


def sums(path: Path, count: int, seed: int, *, most: int = 9, test: bool = False, wrong: float = 0.0) -> None:
    """Write small word problems as JSONL: numbers are common to all files, no wording of a test file is in the others; a wrong one is off by one."""
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        name, thing = rng.choice(NAMES), rng.choice(THINGS)
        a, b, more = rng.randint(1, most), rng.randint(1, most), rng.random() < 0.5
        if ((NAMES.index(name) + THINGS.index(thing) + a + b) % 5 == 0) == test:
            value, sign = (a + b, "+") if more else (a - b, "-")
            shown = value + (rng.choice((-1, 1)) if rng.random() < wrong else 0)
            question = f"{name} has {a} {thing} and {'finds' if more else 'loses'} {b}. How many now?"
            row = {"question": question, "answer": str(value), "solution": f"{a} {sign} {b} = {shown}"}
            rows.append(row | {"demonstrated_answer": str(shown)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_data(folder: Path) -> None:
    """Write the files of the tasks."""
    sums(folder / "train.jsonl", 1500, 1)
    sums(folder / "test.jsonl", 200, 3, test=True)
    sums(folder / "careless.jsonl", 4000, 2, wrong=0.5)
    sums(folder / "right.jsonl", 4000, 4)
    sums(folder / "wrong.jsonl", 4000, 5, wrong=0.75)
    sums(folder / "sixty.jsonl", 60, 6)
    sums(folder / "larger.jsonl", 200, 7, most=15, wrong=0.2)
    sums(folder / "larger-train.jsonl", 1500, 8, most=15)
    sums(folder / "larger-test.jsonl", 200, 9, most=15, test=True)


def filled(folder: Path, lines: tuple[str, ...], demos: str) -> list[str]:
    larger = "larger-" if demos == "larger" else ""
    names = {
        "{f}": str(folder),
        "{demos}": demos,
        "/train.jsonl": f"/{larger}train.jsonl",
        "/test.jsonl": f"/{larger}test.jsonl",
    }
    made = []
    for line in lines:
        for mark, text in names.items():
            line = line.replace(mark, text)
        made.append(line)
    return made


def base(folder: Path, name: str) -> Path:
    """Return the folder of a start's SFT, trained where it is not there yet."""
    recipe, lines, demos, steps, each = BASES[name]
    run, lines = folder / "bases" / name, filled(folder, lines, demos)
    if name == "teacher":  # of the same tokenizer
        lines.append(f"model.name={base(folder, 'sums') / 'final'}")
    if not (run / "sft" / "final").is_dir():
        shutil.rmtree(run, ignore_errors=True)
        own = ["grpo.enabled=false", "eval.enabled=false", f"sft.max_steps={steps}", f"sft.save_steps={each}"]
        own += ["sft.save_total_limit=100", f"output_dir={run.parent}", f"run_name={name}", "threads=1"]
        run_recipe(load_recipe(recipe, [*lines, *own]).recipe, display=Quiet())
    return run / "sft"


def task_lines(folder: Path, name: str) -> tuple[str, list[str]]:
    """Return the recipe and the overrides of a task."""
    recipe, lines, demos, start, sft, grpo = TASKS[name]
    own = [*filled(folder, lines, demos), *COMMON, f"sft.max_steps={sft}", f"grpo.max_steps={grpo}"]
    if start:
        of, _, step = start.partition("/")
        own.append(f"model.name={base(folder, of) / f'checkpoint-{step}'}")
    if "teacher" in name:
        base(folder, "teacher")
    return recipe, own


def full(folder: Path, name: str) -> dict[str, Any]:
    """Run every route of a task for the same processor seconds; return what each reached."""
    recipe, lines = task_lines(folder, name)
    planned = load_recipe(recipe, lines).recipe
    per_step: dict[str, float] = {}
    budget, share, rows, samples = 0.0, 0.5, {}, {}
    for route in routes_of(planned):
        if not planned.model.name.startswith("/") and route.stages == ("grpo",):
            continue  # from scratch nothing is right, so nothing is reinforced: 0.0 % of 200 after 167 steps
        change = list(route.change)
        if budget:
            steps = route.steps(budget, per_step, share)
            change += [f"{stage}.max_steps={count}" for stage, count in steps.items()]
        shutil.rmtree(folder / "run", ignore_errors=True)
        began = time.process_time()
        loaded = load_recipe(recipe, [*lines, *change, f"output_dir={folder}", "run_name=run"]).recipe
        run = run_recipe(loaded, display=Quiet())
        took = time.process_time() - began
        each = run.times.seconds
        seconds = {stage: each.get(stage, 0.0) * took / sum(each.values()) for stage in ("sft", "grpo")}
        if not budget:
            per_step = {
                "sft": seconds["sft"] / planned.sft.max_steps,
                "grpo": seconds["grpo"] / planned.grpo.max_steps,
            }
            budget, share = sum(seconds.values()), seconds["sft"] / sum(seconds.values())
        last = "grpo" if loaded.grpo.enabled else "sft"
        artifact = read_artifact(folder / "run" / "eval", last)
        samples[route.name] = artifact.samples
        value = artifact.metrics["pass@1"]
        rows[route.name] = {
            "pass@1": [value.value, value.low, value.high],
            "greedy": artifact.metrics["greedy_accuracy"].value,
            "seconds": sum(seconds.values()),
            "change": change,
        }
        gc.collect()
    best = max(rows, key=lambda route: rows[route]["pass@1"][0])
    for route, row in rows.items():
        gap = paired_metrics(samples[route], samples[best])["pass@1"]
        row["gap"] = [gap.value, gap.low, gap.high]
        row["wins"] = route == best or gap.low <= 0 or gap.value < POINTS
    return {"task": name, "sealed": name in SEALED, "seconds": budget, "per_step": per_step, "routes": rows}


def race_of(folder: Path, number: int, name: str) -> dict[str, Any]:
    """Race the routes of a task, in a tenth of the seconds that a full run took to train."""
    seconds = max(1.0, 0.1 * json.loads((folder / "full" / f"{number}.json").read_text())["seconds"])
    recipe, lines = task_lines(folder, name)
    runs = folder / "races"
    shutil.rmtree(runs / "run-race", ignore_errors=True)
    began = processor_seconds()
    raced = race(recipe, [*lines, f"output_dir={runs}", "run_name=run"], seconds, as_json=True)
    taken = {**raced.seconds, "all": processor_seconds() - began}
    rows = {
        row["name"]: {key: row[key] for key in ("reached", "expected", "gap", "why")} for row in raced.routes
    }
    return {"ahead": raced.ahead, "close": raced.close, "seconds": taken, "routes": rows}


def table(folder: Path, names: list[tuple[int, str]]) -> None:
    """Print what the full runs and the races said, and how often the races were right."""
    counts = dict.fromkeys(
        ("tasks", "right", "sure", "sure and right", "always the recipe's", "always SFT", "best pilot"), 0
    )
    for number, name in names:
        files = [folder / part / f"{number}.json" for part in ("full", "race")]
        if not all(file.is_file() for file in files):
            continue
        ran, raced = (json.loads(file.read_text()) for file in files)
        wins = [route for route, row in ran["routes"].items() if row["wins"]]
        reached = {route: row["reached"] or 0.0 for route, row in raced["routes"].items()}
        first = max(reached, key=lambda route: reached[route])
        counts["tasks"] += 1
        counts["right"] += raced["ahead"] in wins
        counts["sure"] += not raced["close"]
        counts["sure and right"] += not raced["close"] and raced["ahead"] in wins
        counts["always the recipe's"] += next(iter(ran["routes"])) in wins
        counts["always SFT"] += "SFT alone" in wins
        counts["best pilot"] += first in wins
        print(
            f"\n{name}{' (sealed)' if name in SEALED else ''}: {'right' if raced['ahead'] in wins else 'WRONG'}: {raced['ahead']}"
        )
        for route, row in ran["routes"].items():
            mark, guess = "*" if row["wins"] else " ", raced["routes"][route]
            expected = f"{100 * guess['expected'][0]:5.1f}" if guess["expected"] else "    –"
            print(
                f"  {mark} {route:<32} full {100 * row['pass@1'][0]:5.1f} % in {row['seconds']:3.0f} s · pilot "
                f"{100 * reached[route]:5.1f} · expected {expected}"
            )
        took = raced["seconds"]
        print(
            f"    could not tell: {', '.join(raced['close']) or 'none'} · pilots {took['taken']:.1f} s, planned {took['planned']:.1f}, "
            f"a full run {ran['seconds']:.0f} ({took['taken'] / ran['seconds']:.0%}); race with loading and measuring {took['all']:.1f} s"
        )
    print(f"\n{counts}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("full", "races", "table"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--open", action="store_true", help="only the tasks that are not sealed")
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    folder, ends = options.out.resolve(), time.monotonic() + 60 * options.minutes
    for part in ("full", "race"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    write_data(folder)
    for number, name in enumerate(TASKS):
        if (options.open and name in SEALED) or time.monotonic() > ends:
            continue
        file = folder / "full" / f"{number}.json"
        if options.what == "full" and not file.is_file():
            file.write_text(json.dumps(full(folder, name)))
            print(f"{number} {name}: done", file=sys.stderr, flush=True)
        if options.what == "races" and (folder / "full" / f"{number}.json").is_file():
            (folder / "race" / f"{number}.json").write_text(json.dumps(race_of(folder, number, name)))
    if options.what == "table":
        table(folder, [(n, name) for n, name in enumerate(TASKS) if not (options.open and name in SEALED)])


if __name__ == "__main__":
    main()
