"""Estimators after equal processor seconds from the same SFT model: pass@1 and pass@8, three seeds, differences to GRPO.

    python benchmarks/estimators.py --out runs/estimators [--seconds 120] [--seeds 3] [--arms GRPO RLOO …] [--save]
    python benchmarks/estimators.py --out runs/stories --task story_problems --start runs/smollm2-demo/sft/final --seconds 1800

The quickstart, or SmolLM2 on generated word problems or bare sums: problems, model after SFT and GRPO of the recipe with a constant
learning rate, the reward ``correct`` alone, two updates for each rollout batch (with one, all losses are the same). The arms take turns,
seed after seed, and stop after the first step that ends beyond ``--seconds`` of the processor (one thread); evaluation is left out.
pass@k is estimated from ``--samples`` of each held-out problem at temperature 1; a problem's value is its mean over seeds, and
differences are paired over problems.

Each finished run is a file of its own in ``--out``; the same command continues where it was stopped, and refuses the files of other
settings or another processor. ``--picture FILE.svg`` measures nothing and draws all that was saved, task under task.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import measure
import torch
from transformers import TrainerCallback

from algorist.config.load import load_recipe
from algorist.data import load_problems
from algorist.data.problems import Problems
from algorist.evaluation.estimators import paired_difference, pass_at_k, share_interval
from algorist.evaluation.run import EvaluationSetting, evaluate
from algorist.models.load import load_policy
from algorist.rewards import build_rewards
from algorist.rollouts import make_engine
from algorist.runs.asking import recipe_format
from algorist.runs.pipeline import run_recipe
from algorist.store.atomic import replace_text
from algorist.store.run_log import Quiet
from algorist.training.grpo_setup import make_grpo_trainer

SUM = "grpo.reduction=seq-mean-token-sum-norm"
ARMS = {
    "GRPO": ["grpo.loss=grpo", "grpo.advantage=group_normalized"],
    "Dr. GRPO": ["grpo.preset=dr_grpo"],
    "RLOO": [SUM, "grpo.advantage=leave_one_out"],
    "MaxRL": [SUM, "grpo.advantage=maxrl"],
    "W-REINFORCE": ["grpo.preset=w_reinforce"],
    "CISPO": ["grpo.loss=cispo", "grpo.advantage=group_normalized"],
    "DAPO": ["grpo.loss={name: dapo, clip_high: 0.28}", "grpo.advantage=group_normalized", "grpo.resample={when_below: 1}"],
}  # fmt: skip
SMOLLM2 = ["threads=1", "grpo.batch_size=32", "data.eval.split=test"]
"""A step of 32 completions, so that a budget of minutes has some of them."""
TASKS = {
    "quickstart": ("quickstart", []),
    "story_problems": ("smollm2-grpo", [
        *SMOLLM2, "data.eval.name=story_problems", "data.eval.params={count: 100, seed: 3, traps: true}",
    ]),
    "equations": ("smollm2-grpo", [
        *SMOLLM2, "data.train.name=equations", "data.train.params={count: 2000, seed: 2, each: 1}",
        "data.eval.name=equations", "data.eval.params={count: 100, seed: 3, each: 1}",
    ]),
}  # fmt: skip
"""Task → recipe and what differs from it."""
FIRST = "GRPO"
KS = (1, 8)


def recipe_of(task: str, folder: Path, *changes: str) -> Any:
    """Return the task's recipe with what all arms share."""
    name, own = TASKS[task]
    common = (
        "eval.enabled=false", f"output_dir={folder}", "rewards=[correct]", "grpo.max_steps=100000", "grpo.save_steps=100000",
        "grpo.lr_scheduler=constant_with_warmup", "grpo.num_iterations=2",
    )  # fmt: skip
    return load_recipe(name, [*own, *common, *changes]).recipe


class Budget(TrainerCallback):
    """Ends the training once the processor has spent the seconds."""

    def __init__(self, seconds: float) -> None:
        self.allowed, self.seconds = seconds, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Look at it."""
        self.seconds = time.process_time() - self._began
        control.should_training_stop |= self.seconds >= self.allowed
        return control


def train(arm: str, seed: int, start: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one arm for the budget; return for each k the pass@k of every held-out problem."""
    recipe = recipe_of(arguments.task, arguments.out, *ARMS[arm], f"seed={seed}")
    form, device = recipe_format(recipe), torch.device("cpu")
    policy = load_policy(start, device=device, trainable=True, like=recipe.model)
    problems, budget = Problems.load(recipe), Budget(arguments.seconds)
    trainer = make_grpo_trainer(
        model=policy.model, tokenizer=policy.tokenizer, problems=problems.train, prompt_format=form, section=recipe.grpo,
        rewards=build_rewards(recipe.rewards, form, matcher=recipe.matcher), device=device, seed=seed, callbacks=[budget],
        engine=make_engine("auto", policy.model, policy.tokenizer), output_dir=arguments.out / "trainer",
    )  # fmt: skip
    if arguments.seconds:
        trainer.train()
    tokens, samples = recipe.grpo.max_completion_tokens, arguments.samples
    setting = EvaluationSetting(samples, 1.0, 1.0, tokens, recipe.eval.batch_size, recipe.matcher, 7)
    engine = make_engine("auto", policy.model, policy.tokenizer)
    right: dict[str, list[bool]] = defaultdict(list)
    held_out = load_problems(recipe.data.eval)
    for row in evaluate(engine, policy.tokenizer, held_out, form, setting, greedy=False):
        right[row["problem_id"]].append(bool(row["correct"]))
    values = {k: [pass_at_k(len(r), sum(r), k) for _, r in sorted(right.items())] for k in KS}
    return {
        "arm": arm,
        "seed": seed,
        "steps": trainer.state.global_step,
        "seconds": budget.seconds,
        "pass_at": values,
    }


def stored(path: Path, same: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the run in the file, or make it and write it there before anything else happens.

    Raises:
        SystemExit: The file is of other settings.
    """
    if path.is_file():
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if other := sorted(key for key in same if run["same"].get(key) != same[key]):
            raise SystemExit(f"{path} was made with another {', '.join(other)}; take another --out")
    else:
        run = make() | {"same": dict(same), "environment": measure.environment()}
        replace_text(path, json.dumps(run, indent=1) + "\n")
    if "pass_at" in run:
        run["pass_at"] = {int(k): values for k, values in run["pass_at"].items()}
    return run


def digest(folder: Path) -> str:
    """Return the first digits of the hash of a model's weights."""
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        total.update(path.read_bytes())
    return total.hexdigest()[:12]


def start_of(arguments: argparse.Namespace) -> Path:
    """Return the model that all arms start from: ``--start``, or the recipe's after its SFT."""
    if arguments.start:
        return arguments.start
    final = arguments.out / "sft" / "sft" / "final"
    if not final.is_dir():
        fewer = [f"sft.max_steps={arguments.sft_steps}"] if arguments.sft_steps else []
        recipe = recipe_of(arguments.task, arguments.out, "grpo.enabled=false", "run_name=sft", *fewer)
        resume = (arguments.out / "sft" / "config.yaml").is_file()
        if run_recipe(recipe, display=Quiet(), resume=resume).stopped:
            raise SystemExit("stopped in the SFT; the same command continues it")
    return final


def over_seeds(runs: Sequence[Mapping[str, Any]], arm: str, k: int) -> list[float]:
    """Return each problem's pass@k, averaged over the seeds."""
    return [
        mean(values) for values in zip(*(run["pass_at"][k] for run in runs if run["arm"] == arm), strict=True)
    ]


def results_of(runs: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return for each arm and k the mean with its interval, and the paired difference to the first arm."""
    results: dict[str, dict[str, Any]] = {}
    for arm in arms:
        row: dict[str, Any] = {"steps": [run["steps"] for run in runs if run["arm"] == arm]}
        for k in KS:
            values, first = over_seeds(runs, arm, k), over_seeds(runs, arms[0], k)
            row[f"pass@{k}"] = vars_of(share_interval(values))
            if arm != arms[0]:
                row[f"pass@{k} against {arms[0]}"] = vars_of(paired_difference(first, values))
        results[arm] = row
    return results


def vars_of(interval: Any) -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def picture(tasks: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG of saved tasks, one under another."""
    top, lines = 0, []
    for task in tasks:
        text, height = panel(task)
        lines.append(f'<g transform="translate(0 {top})">{text}</g>')
        top += height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {top}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *lines, "</svg>", ""])


def panel(task: Mapping[str, Any]) -> tuple[str, int]:
    """Return a row for each arm, its mean with its interval, pass@1 to the left and pass@8 to the right; and the height."""
    row, left, width, gap = 26, 110, 300, 60
    results, settings = task["results"], task["settings"]
    high = 70 + row * len(results)
    starts = ", ".join(f"pass@{k} {100 * task['start'][f'pass@{k}']['value']:.1f} %" for k in KS)
    title = f"{settings['task']}: {settings['seconds']:g} processor seconds from {starts}; seeds: {settings['seeds']}; 95 % over problems"
    lines = [f'<text x="10" y="22">{escape(title)}</text>']
    for column, k in enumerate(KS):
        values = {arm: r[f"pass@{k}"] for arm, r in results.items()}
        low, top = min(v["low"] for v in values.values()), max(v["high"] for v in values.values())
        start, scale = left + column * (width + gap), width / max(top - low, 0.01)
        lines.append(f'<text x="{start}" y="48" font-weight="bold">pass@{k}</text>')
        for tick in range(4):
            value = low + (top - low) * tick / 3
            lines.append(
                f'<text x="{start + (value - low) * scale:.0f}" y="{high + 15}" fill="gray" '
                f'text-anchor="middle">{100 * value:.1f} %</text>'
            )
        first = start + (values[next(iter(values))]["value"] - low) * scale
        lines.append(f'<path d="M{first:.1f} 56V{high - 4}" stroke="silver" stroke-dasharray="3"/>')
        for place, (arm, v) in enumerate(values.items()):
            y, x = 70 + row * place, [start + (v[end] - low) * scale for end in ("low", "value", "high")]
            if not column:
                lines.append(f'<text x="10" y="{y + 4}">{escape(arm)}</text>')
            lines.append(
                f'<path d="M{x[0]:.1f} {y}H{x[2]:.1f}" stroke="#246" stroke-width="2"/>'
                f'<circle cx="{x[1]:.1f}" cy="{y}" r="4" fill="#246"/>'
            )
    return "\n".join(lines), high + 30


def main() -> None:
    """Print one line per run, then each arm with its intervals."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/estimators"))
    parser.add_argument("--task", default="quickstart", choices=list(TASKS))
    parser.add_argument(
        "--start", type=Path, help="a model after SFT; the recipe's own is made when left out"
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--sft-steps", type=int, help="fewer than the recipe's, to try the benchmark out")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.picture:
        saved = [measure.BASELINES / f"estimators-{task}-1t.json" for task in TASKS]
        tasks = [json.loads(path.read_text(encoding="utf-8")) for path in saved if path.is_file()]
        arguments.picture.write_text(picture(tasks), encoding="utf-8")
        return
    arguments.out = arguments.out.resolve()
    (arguments.out / "runs").mkdir(parents=True, exist_ok=True)
    arms = sorted(arguments.arms, key=lambda arm: arm != FIRST)
    start, runs = start_of(arguments), []
    now = measure.environment()
    same = {key: getattr(arguments, key) for key in ("task", "seconds", "samples")}
    same |= {"start": digest(start), "cpu": now["cpu"], "libraries": now["libraries"]}
    before = stored(
        arguments.out / "runs" / "start.json",
        {**same, "seconds": 0.0},
        lambda: train(FIRST, 0, start, argparse.Namespace(**{**vars(arguments), "seconds": 0.0})),
    )
    print("start: " + shares_of(before), flush=True)
    for seed in range(1, arguments.seeds + 1):
        turn = seed % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            path = arguments.out / "runs" / f"{re.sub(r'[^A-Za-z]+', '-', arm).strip('-')}-{seed}.json"
            runs.append(stored(path, same, partial(train, arm, seed, start, arguments)))
            last = runs[-1]
            print(
                f"{arm:12} seed {seed}: {last['steps']:4} steps, {last['seconds']:.0f} s, {shares_of(last)}",
                flush=True,
            )
    results = results_of(runs, arms)
    for arm, row in results.items():
        for metric, value in row.items():
            if metric != "steps":
                print(
                    f"{arm:12} {metric:22} {value['value']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}]"
                )
    if arguments.save:
        settings = {**same, "seeds": arguments.seeds, "arms": arms}
        start_pass = {f"pass@{k}": vars_of(share_interval(before["pass_at"][k])) for k in KS}
        shares = [{key: run[key] for key in ("arm", "seed", "steps", "seconds")} for run in runs]
        payload = {"settings": settings, "start": start_pass, "results": results, "runs": shares}
        measure.save_json(f"estimators-{arguments.task}-1t", payload)


def shares_of(run: Mapping[str, Any]) -> str:
    return ", ".join(f"pass@{k} {mean(run['pass_at'][k]):.3f}" for k in KS)


if __name__ == "__main__":
    main()
