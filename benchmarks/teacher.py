"""How much of the gap to its teacher a student closes, against GRPO; what is done is kept, and the same command goes on.

    python benchmarks/teacher.py toy                        # a teacher three times as large, five seeds
    python benchmarks/teacher.py smollm2 --seeds 1 2 3      # SmolLM2-135M: a later checkpoint of its SFT teaches an earlier one

``toy``: the quickstart's model after SFT and GRPO teaches one of a third of its size after the same SFT (recipe quickstart-distill); GRPO
has the quickstart's own settings. ``smollm2``: a teacher of the same size, ``both`` is GRPO with the teacher beside its reward. Gap
closed: (student after - before) / (teacher - before), in pass@1 of eight sampled completions of problems that nothing trained on; its
interval is over these problems, each averaged over the seeds. Seconds are processor seconds of a stage, loading included, in one thread;
evaluations are not in them. ``--save`` writes the result to benchmarks/baselines.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import measure
import numpy as np
import torch
from estimators import digest, stored, vars_of

from algorist.config.load import load_recipe
from algorist.data import load_problems
from algorist.evaluation.estimators import mean_interval, paired_difference, pass_at_k, share_interval
from algorist.evaluation.run import EvaluationSetting, evaluate
from algorist.models.load import load_policy
from algorist.rollouts import make_engine
from algorist.runs.asking import recipe_format
from algorist.runs.pipeline import run_recipe
from algorist.store.run_log import Quiet

SAMPLES, KS, DRAWS = 8, (1, 8), 4000
HOME = ("device=cpu", "threads=1", "eval.enabled=false")


class Made(NamedTuple):
    """A recipe with settings, and the model in its run's folder."""

    recipe: str
    settings: tuple[str, ...]
    model: str = "grpo/final"


class Task(NamedTuple):
    """What is compared: arms from one student, the first of which learns from the teacher alone."""

    student: Made
    teacher: Made
    arms: dict[str, Made]
    held_out: str


SFT = ("grpo.enabled=false", "sft.max_steps=80", "sft.save_steps=20", "sft.save_total_limit=4", "seed=1")
DISTILL = ("grpo.max_steps=12", "grpo.save_steps=1000")
TASKS = {
    "toy": Task(
        Made("quickstart", ("grpo.enabled=false", "model.tiny.hidden_size=56"), "sft/final"),
        Made("quickstart", ()),
        {"teacher": Made("quickstart-distill", ()), "grpo": Made("quickstart", ("grpo.max_steps=290",))},
        "{name: arithmetic, split: test, params: {count: 250, seed: 3}}",
    ),
    "smollm2": Task(
        Made("smollm2-grpo", SFT, "sft/checkpoint-20"),
        Made("smollm2-grpo", SFT, "sft/final"),
        {
            "teacher": Made("smollm2-distill", DISTILL),
            "grpo": Made("smollm2-grpo", ("grpo.max_steps=24", "grpo.save_steps=1000")),
            "both": Made("smollm2-distill", (*DISTILL, "grpo.group_size=4", "rewards.0.weight=1")),
        },
        "{name: story_problems, split: test, params: {count: 100, seed: 3, traps: true}}",
    ),
}


def train(out: Path, name: str, made: Made, *settings: str) -> float:
    """Run a recipe from its beginning; return its processor seconds."""
    shutil.rmtree(out / name, ignore_errors=True)
    recipe = load_recipe(
        made.recipe, [f"output_dir={out}", f"run_name={name}", *HOME, *made.settings, *settings]
    ).recipe
    began = time.process_time()
    if run_recipe(recipe, display=Quiet()).stopped:
        raise SystemExit("stopped; the same command begins this run again")
    return time.process_time() - began


def right(task: Task, model: Path) -> list[int]:
    """Return how many of the samples of each held-out problem are right."""
    recipe = load_recipe(task.arms["grpo"].recipe, [f"data.eval={task.held_out}", *HOME]).recipe
    policy = load_policy(model, device=torch.device("cpu"), like=recipe.model)
    engine = make_engine("auto", policy.model, policy.tokenizer)
    setting = EvaluationSetting(
        SAMPLES, 1.0, 1.0, recipe.grpo.max_completion_tokens, recipe.eval.batch_size, recipe.matcher, 7
    )
    problems, form = load_problems(recipe.data.eval), recipe_format(recipe)
    counts: dict[str, int] = defaultdict(int)
    for row in evaluate(engine, policy.tokenizer, problems, form, setting, greedy=False):
        counts[row["problem_id"]] += bool(row["correct"])
    return [counts[key] for key in sorted(counts)]


def pass_at(counts: Sequence[int], k: int) -> list[float]:
    return [pass_at_k(SAMPLES, count, k) for count in counts]


def closed(before: Sequence[float], goal: Sequence[float], after: Sequence[float]) -> list[float]:
    """Return the share of the gap that is closed, and its 95 % interval by resampling problems."""
    start, teacher, values = (np.array(x) for x in (before, goal, after))
    drawn = np.random.default_rng(0).integers(len(start), size=(DRAWS, len(start)))
    shares = (values - start)[drawn].mean(1) / (teacher - start)[drawn].mean(1)
    value = (values - start).mean() / (teacher - start).mean()
    return [float(value), *np.quantile(shares, [0.025, 0.975]).tolist()]


def summary(runs: Sequence[dict[str, Any]], before: Sequence[int], goal: Sequence[int]) -> dict[str, Any]:
    """Return for each arm its seconds, pass@k, the gap that it closes, and the difference to the first over problems and over seeds."""
    result: dict[str, Any] = {}
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    start, teacher = ({k: pass_at(counts, k) for k in KS} for counts in (before, goal))
    for arm in arms:
        own, first = ([run for run in runs if run["arm"] == name] for name in (arm, arms[0]))
        seconds = [run["seconds"] for run in own]
        row: dict[str, Any] = {
            "seconds": seconds,
            "times the first": mean(seconds) / mean(run["seconds"] for run in first),
        }
        for k in KS:
            of_seeds, others = ([pass_at(run["right"], k) for run in group] for group in (own, first))
            values, other = (
                [mean(column) for column in zip(*rows, strict=True)] for rows in (of_seeds, others)
            )
            row[f"pass@{k}"] = vars_of(share_interval(values))
            row[f"pass@{k} gained"] = vars_of(paired_difference(start[k], values))
            if arm != arms[0]:
                row[f"pass@{k} of {arms[0]} beyond"] = vars_of(paired_difference(values, other))
        gaps = {
            name: [closed(start[1], teacher[1], pass_at(run["right"], 1))[0] for run in group]
            for name, group in ((arms[0], first), (arm, own))
        }
        averaged = [mean(column) for column in zip(*(pass_at(run["right"], 1) for run in own), strict=True)]
        row |= {"gap closed": closed(start[1], teacher[1], averaged), "of each seed": gaps[arm]}
        row["over seeds"] = vars_of(mean_interval(gaps[arm]))
        if arm != arms[0] and len(own) == len(first) > 1:
            row[f"{arms[0]} closes more, over seeds"] = vars_of(paired_difference(gaps[arm], gaps[arms[0]]))
        result[arm] = row
    return result


def table(result: dict[str, Any]) -> str:
    """Return the arms as lines of text."""
    lines = []
    for arm, row in result.items():
        seconds = f"{mean(row['seconds']):.0f} s"
        share, low, high = (f"{100 * x:.0f}" for x in row["gap closed"])
        each = ", ".join(f"{share:.0%}" for share in row["of each seed"])
        lines.append(f"{arm:8} {seconds:>6}: gap closed {share} % [{low}, {high}]; seeds {each}")
        for name, value in row.items():
            if isinstance(value, dict):
                lines.append(
                    f"           {name:32} {value['value']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}]"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--out", type=Path, default=Path("runs/teacher"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--arms", nargs="+", help="all of the task's when left out")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task, out = TASKS[options.task], options.out.resolve() / options.task
    (out / "results").mkdir(parents=True, exist_ok=True)
    models: dict[str, Path] = {}
    for name, made in (("teacher", task.teacher), ("student", task.student)):
        run = "teacher" if made[:2] == task.teacher[:2] else name
        if not (out / run / made.model).is_dir():
            train(out, run, made)
        models[name] = out / run / made.model
    now = measure.environment()
    same = {name: digest(path) for name, path in models.items()} | {
        "held_out": task.held_out,
        "cpu": now["cpu"],
    }

    def evaluated(name: str, model: Path, **more: Any) -> dict[str, Any]:
        return {"name": name, "right": right(task, model), **more}

    def made(arm: str, seed: int) -> dict[str, Any]:
        name = f"{arm}-{seed}"
        own = [f"seed={seed}", "sft.enabled=false", f"model.name={models['student']}"]
        if "teacher" in arm or arm == "both":
            own.append(f"grpo.teacher.model={models['teacher']}")
        seconds = train(out, name, task.arms[arm], *own)
        result = evaluated(name, out / name / "grpo" / "final", arm=arm, seed=seed, seconds=seconds)
        shutil.rmtree(out / name)
        return result

    ends = {
        name: stored(out / "results" / f"{name}.json", same, partial(evaluated, name, models[name]))["right"]
        for name in models
    }
    for name, counts in ends.items():
        print(f"{name}: " + ", ".join(f"pass@{k} {mean(pass_at(counts, k)):.1%}" for k in KS), flush=True)
    runs = []
    done = [
        (int(path.stem.rpartition("-")[2]), path.stem.rpartition("-")[0])
        for path in (out / "results").glob("*-*.json")
    ]
    runs_here = [(seed, arm) for seed in options.seeds for arm in options.arms or task.arms]
    for seed, arm in dict.fromkeys([*runs_here, *sorted(done)]):
        settings = {**same, "settings": [task.arms[arm].recipe, *task.arms[arm].settings]}
        run = stored(out / "results" / f"{arm}-{seed}.json", settings, partial(made, arm, seed))
        share = closed(*(pass_at(x, 1) for x in (ends["student"], ends["teacher"], run["right"])))[0]
        print(f"{arm:8} seed {seed}: {run['seconds']:.0f} s, gap closed {share:.0%}", flush=True)
        runs.append(run)
    runs.sort(key=lambda run: (list(task.arms).index(run["arm"]), run["seed"]))
    if not runs:
        return
    result = summary(runs, ends["student"], ends["teacher"])
    print(table(result))
    if options.save:
        rows = [
            {**{key: run[key] for key in ("arm", "seed", "seconds")}, "right": digits(run["right"])}
            for run in runs
        ]
        named = {name: digits(counts) for name, counts in ends.items()}
        payload = {
            "settings": dict(task.arms),
            "held_out": task.held_out,
            **named,
            "result": result,
            "runs": rows,
        }
        measure.save_json(f"teacher-{options.task}", payload)


def digits(counts: Sequence[int]) -> str:
    """Return how many samples of each problem are right, a digit each."""
    return "".join(map(str, counts))


if __name__ == "__main__":
    main()
