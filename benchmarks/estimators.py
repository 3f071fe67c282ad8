"""Estimators after equal processor seconds on the quickstart's task: pass@1 and pass@8, three seeds, differences to GRPO.

    python benchmarks/estimators.py [--seconds 120] [--seeds 3] [--arms GRPO RLOO …] [--save] [--picture docs/estimators.svg]

The quickstart: its word problems, its model after its SFT, its GRPO with a constant learning rate, the reward ``correct`` alone, two
updates for each rollout batch (with one, all losses are the same). The arms take turns, seed after seed, from the same SFT model, and
stop after the first step that ends beyond ``--seconds`` of the processor (one thread); evaluation is left out. pass@k is estimated from
``--samples`` of each held-out problem at temperature 1; a problem's value is its mean over seeds, and differences are paired over problems.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
from algorist.evaluation.estimators import mean_interval, paired_difference, pass_at_k
from algorist.evaluation.run import EvaluationSetting, evaluate
from algorist.models.load import load_policy
from algorist.prompts.attached import recipe_format
from algorist.rewards import build_rewards
from algorist.rollouts import make_engine
from algorist.runs.pipeline import run_recipe
from algorist.runs.plan import Problems
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
FIRST = "GRPO"
KS = (1, 8)


def recipe_of(folder: Path, *changes: str) -> Any:
    """Return the quickstart with what all arms share."""
    common = (
        "eval.enabled=false", f"output_dir={folder}", "rewards=[correct]", "grpo.max_steps=100000", "grpo.save_steps=100000",
        "grpo.lr_scheduler=constant_with_warmup", "grpo.num_iterations=2",
    )  # fmt: skip
    return load_recipe("quickstart", [*common, *changes]).recipe


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


def train(arm: str, seed: int, start: Path, folder: Path, seconds: float, samples: int) -> dict[str, Any]:
    """Train one arm for ``seconds``; return for each k the pass@k of every held-out problem."""
    recipe = recipe_of(folder, *ARMS[arm], f"seed={seed}")
    form, device = recipe_format(recipe), torch.device("cpu")
    policy = load_policy(start, device=device, trainable=True, like=recipe.model)
    problems, budget = Problems.load(recipe), Budget(seconds)
    trainer = make_grpo_trainer(
        model=policy.model, tokenizer=policy.tokenizer, problems=problems.train, prompt_format=form, section=recipe.grpo,
        rewards=build_rewards(recipe.rewards, form, matcher=recipe.matcher), device=device, seed=seed, callbacks=[budget],
        engine=make_engine("auto", policy.model, policy.tokenizer), output_dir=folder / f"{arm}-{seed}",
    )  # fmt: skip
    if seconds:
        trainer.train()
    setting = EvaluationSetting(samples, 1.0, 1.0, recipe.grpo.max_completion_tokens, 250, recipe.matcher, 7)
    engine = make_engine("auto", policy.model, policy.tokenizer)
    right: dict[str, list[bool]] = defaultdict(list)
    for row in evaluate(
        engine, policy.tokenizer, load_problems(recipe.data.eval), form, setting, greedy=False
    ):
        right[row["problem_id"]].append(bool(row["correct"]))
    values = {k: [pass_at_k(len(r), sum(r), k) for _, r in sorted(right.items())] for k in KS}
    return {
        "arm": arm,
        "seed": seed,
        "steps": trainer.state.global_step,
        "seconds": budget.seconds,
        "pass_at": values,
    }


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
            row[f"pass@{k}"] = vars_of(mean_interval(values))
            if arm != arms[0]:
                row[f"pass@{k} against {arms[0]}"] = vars_of(paired_difference(first, values))
        results[arm] = row
    return results


def vars_of(interval: Any) -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def picture(results: Mapping[str, Mapping[str, Any]], title: str) -> str:
    """Return an SVG: pass@1 to the right, pass@8 upwards, a cross of both intervals for each arm."""
    ends = [r[f"pass@{k}"][end] for r in results.values() for k in KS for end in ("low", "high")]
    low, high = min(ends), max(max(ends), min(ends) + 0.01)
    size, edge = 420, 60

    def place(value: float) -> float:
        return edge + (value - low) / (high - low) * size

    whole = size + 2 * edge
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {whole}" font-family="sans-serif" font-size="12">',
        f'<rect width="{whole}" height="{whole}" fill="white"/>',
        f'<text x="{edge}" y="30">{escape(title)}</text>',
        f'<text x="{whole / 2}" y="{whole - 15}">pass@1</text>',
        f'<text x="15" y="{whole / 2}" transform="rotate(-90 15 {whole / 2})">pass@8</text>',
    ]
    for tick in range(5):
        value = low + (high - low) * tick / 4
        at = place(value)
        lines.append(f'<text x="{at - 12:.0f}" y="{whole - edge + 18}" fill="gray">{value:.2f}</text>')
        lines.append(f'<text x="{edge - 34}" y="{whole - at + 4:.0f}" fill="gray">{value:.2f}</text>')
    for number, (arm, row) in enumerate(results.items()):
        color = f"hsl({number * 360 // len(results)} 70% 40%)"
        (x, y), (x0, x1), (y0, y1) = (
            tuple(place(row[f"pass@{k}"]["value"]) for k in KS),
            *(tuple(place(row[f"pass@{k}"][end]) for end in ("low", "high")) for k in KS),
        )
        lines.append(
            f'<g stroke="{color}" fill="{color}"><path d="M{x0:.1f} {whole - y:.1f}H{x1:.1f}M{x:.1f} {whole - y0:.1f}V{whole - y1:.1f}"/>'
            f'<text stroke="none" x="{x + 5:.1f}" y="{whole - y - 5:.1f}">{escape(arm)}</text></g>'
        )
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Print one line per run, then each arm with its intervals."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--sft-steps", type=int, help="fewer than the quickstart's, to try the benchmark out")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arms = sorted(arguments.arms, key=lambda arm: arm != FIRST)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fewer = [f"sft.max_steps={arguments.sft_steps}"] if arguments.sft_steps else []
        run_recipe(recipe_of(folder, "grpo.enabled=false", "run_name=sft", *fewer), display=Quiet())
        for seed in range(1, arguments.seeds + 1):
            turn = seed % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                start = folder / "sft" / "sft" / "final"
                runs.append(train(arm, seed, start, folder, arguments.seconds, arguments.samples))
                last = runs[-1]
                shares = ", ".join(f"pass@{k} {mean(last['pass_at'][k]):.3f}" for k in KS)
                print(
                    f"{arm:12} seed {seed}: {last['steps']:4} steps, {last['seconds']:.0f} s, {shares}",
                    flush=True,
                )
    results = results_of(runs, arms)
    for arm, row in results.items():
        for metric, value in row.items():
            if metric != "steps":
                print(
                    f"{arm:12} {metric:22} {value['value']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}]"
                )
    if arguments.picture:
        title = f"quickstart, {arguments.seconds:g} processor seconds, {arguments.seeds} seeds"
        arguments.picture.write_text(picture(results, title), encoding="utf-8")
    if arguments.save:
        settings = {**vars(arguments), "picture": str(arguments.picture or "")}
        measure.save_json("estimators-1t", {"settings": settings, "results": results, "runs": runs})


if __name__ == "__main__":
    main()
