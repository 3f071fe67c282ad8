"""Seconds of GRPO until a task is solved to a target (pass@1, held-out): algorist against stock TRL.

    python benchmarks/time_to_accuracy.py [--seeds 3] [--target 0.8] [--save]
    python benchmarks/time_to_accuracy.py --task sums --start MODEL --target 0.28 --out DIR [--arms algorist trl refill] [--save]
    … --arms teacher --teacher MODEL

All start from the same SFT model and train with the same problems, rewards and hyperparameters; TRL in its faster setting (no
gradient checkpointing, ``generate``), in the recipe's types. The held-out accuracy is measured every few steps with the same code,
and its time is left out. The runs take turns, one seed after the other, one thread; ``--out`` keeps each finished one, and the same
command continues. ``sums``: SmolLM2-135M and bare sums, one to a problem; ``--start`` is a model after a short SFT, in the baseline the
final one of ``algorist run smollm2-grpo grpo.enabled=false sft.max_steps=12 seed=1``. ``refill`` draws other problems in the places of
groups without a signal; ``teacher`` learns from the next-token distributions of a better model of the same family without a reward,
as ``smollm2-distill`` does, in the baseline from the same SFT of 80 steps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import measure
import torch
from stock_trl import make_stock_trainer
from transformers import TrainerCallback

from algorist.config.load import load_recipe
from algorist.data import load_problems
from algorist.data.problems import Problems
from algorist.evaluation.run import EvaluationSetting, evaluate
from algorist.models.load import load_policy
from algorist.rewards import build_rewards
from algorist.rollouts import make_engine
from algorist.runs.asking import recipe_format
from algorist.runs.pipeline import run_recipe
from algorist.training.extension import Extensions
from algorist.training.grpo_setup import make_grpo_trainer

MAX_STEPS = 240
TASKS: dict[str, tuple[str, list[str], int, int]] = {
    "quickstart": ("quickstart", [], 0, 10),
    "sums": ("smollm2-grpo", [
        "data.train={name: equations, params: {count: 2000, seed: 2, each: 1}}",
        "data.eval={name: equations, split: test, params: {count: 100, seed: 3, each: 1}}",
        "grpo.batch_size=16", "grpo.gradient_accumulation_steps=2", "threads=1",
    ], 4, 2),
}  # fmt: skip
"""Task → recipe, what differs from it, samples of a held-out problem (0: greedy), steps between measurements."""
ARMS: dict[str, list[str]] = {
    "algorist": [],
    "trl": [],
    "refill": ["grpo.resample={when_below: 1}"],
    "teacher": [
        "grpo.teacher={model: TEACHER, loss: full, temperature: 0.3}", "grpo.group_size=1", "grpo.gradient_accumulation_steps=1",
        "grpo.learning_rate=5e-5", "grpo.warmup_steps=1", "grpo.loss=dapo", "rewards=[{name: correct, weight: 0}]",
    ],
}  # fmt: skip


class Clock(TrainerCallback):
    """Counts the processor's seconds of training without evaluation; stops the training at the target."""

    def __init__(self, accuracy: Callable[[], float], target: float, every: int) -> None:
        self.accuracy, self.target, self.every = accuracy, target, every
        self.seconds = 0.0
        self.curve: list[tuple[int, float, float]] = []
        self.reached: float | None = None
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Evaluate every few steps, with the clock stopped."""
        if state.global_step % self.every:
            return control
        self.seconds += time.process_time() - self._began
        accuracy = self.accuracy()
        self.curve.append((state.global_step, round(self.seconds, 2), accuracy))
        print(f"  step {state.global_step}, {self.seconds:.0f} s: {accuracy:.3f}", flush=True)
        if accuracy >= self.target and self.reached is None:
            self.reached = self.seconds
            control.should_training_stop = True
        self._began = time.process_time()
        return control


def train(who: str, seed: int, model: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one arm until the target; return seconds and the curve."""
    name, changes, samples, every = TASKS[arguments.task]
    own = [change.replace("TEACHER", str(arguments.teacher)) for change in ARMS[who]]
    recipe = load_recipe(name, [*changes, *own, f"seed={seed}"]).recipe
    device, form = torch.device("cpu"), recipe_format(recipe)
    policy = load_policy(model, device=device, trainable=True, like=recipe.model)
    data, held_out = Problems.load(recipe), load_problems(recipe.data.eval)
    tokens = recipe.grpo.max_completion_tokens
    setting = EvaluationSetting(samples, 1.0, 1.0, tokens, recipe.eval.batch_size, recipe.matcher, seed)

    def accuracy() -> float:
        mode = policy.model.training
        policy.model.eval()
        engine = make_engine("auto", policy.model, policy.tokenizer)
        rows = evaluate(engine, policy.tokenizer, held_out, form, setting, greedy=not samples)
        policy.model.train(mode)
        right = [row["correct"] for row in rows]
        return sum(right) / len(right)

    clock = Clock(accuracy, arguments.target, every)
    ours = who != "trl"  # TRL samples with its own generation
    section = recipe.grpo.model_copy(update={"save_steps": 10**9, "max_steps": arguments.max_steps})
    mine = {"extensions": Extensions.of(recipe)} if ours else {}
    trainer: Any = (make_grpo_trainer if ours else make_stock_trainer)(
        model=policy.model,
        tokenizer=policy.tokenizer,
        problems=data.train,
        prompt_format=form,
        section=section,
        rewards=build_rewards(recipe.rewards, form, matcher=recipe.matcher),
        engine=make_engine("auto", policy.model, policy.tokenizer) if ours else None,
        output_dir=folder,
        seed=seed,
        device=device,
        callbacks=[clock],
        **mine,
    )
    before = accuracy() if arguments.start else None
    trainer.train()
    return {
        "who": who,
        "seed": seed,
        "before": before,
        "seconds": clock.reached,
        "steps": clock.curve[-1][0],
        "seconds_per_step": clock.curve[-1][1] / clock.curve[-1][0],
        "curve": clock.curve,
    }


def main() -> None:
    """Print one line per run and the ratios of the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="quickstart", choices=list(TASKS))
    parser.add_argument("--start", type=Path, help="a model after SFT; the quickstart makes its own")
    parser.add_argument("--teacher", type=Path, help="the model that the arm teacher learns from")
    parser.add_argument("--arms", nargs="+", default=["algorist", "trl"], choices=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--max-steps", type=int, default=MAX_STEPS)
    parser.add_argument("--out", type=Path, help="folder that keeps each run")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    if arguments.task != "quickstart" and arguments.start is None:
        parser.error(f"{arguments.task} starts from a model: --start FOLDER")
    if "teacher" in arguments.arms and arguments.teacher is None:
        parser.error("the arm teacher learns from a model: --teacher FOLDER")
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        out = arguments.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        start = arguments.start or _after_sft(Path(temporary))
        for seed in range(1, arguments.seeds + 1):
            for who in arguments.arms if seed % 2 else arguments.arms[::-1]:
                file = out / f"{who}-{seed}.json"
                if not file.is_file():
                    one = multiprocessing.get_context("spawn").Process(
                        target=_keep, args=(file, who, seed, start, arguments)
                    )
                    one.start()
                    one.join()
                    if one.exitcode:
                        raise SystemExit(
                            f"{who}, seed {seed} ended with {one.exitcode}; the same command continues"
                        )
                run = json.loads(file.read_text(encoding="utf-8"))
                if run["target"] != arguments.target:
                    parser.error(f"{file} was made with another target; take another --out")
                runs.append(run)
                print(
                    f"{who:9} seed {seed}: {run['seconds'] and round(run['seconds'], 1)} s to {arguments.target:.0%}, "
                    f"{run['steps']} steps, {run['seconds_per_step']:.3f} s per step",
                    flush=True,
                )
    times = {who: [r["seconds"] for r in runs if r["who"] == who and r["seconds"]] for who in arguments.arms}
    ratios = {}
    for who in arguments.arms:
        if who != "trl" and len(times[who]) == len(times.get("trl", ())) == arguments.seeds:
            ratios[who] = ratio = measure.ratio_with_interval(times[who], times["trl"])
            print(
                f"{who}: time to {arguments.target:.0%} {ratio['ratio']:.3f}× of TRL's [{ratio['low']:.3f}, {ratio['high']:.3f}], "
                f"n = {ratio['n']}"
            )
    if arguments.save:
        kind = "" if arguments.task == "quickstart" else f"-{arguments.task}"
        payload = {
            "target": arguments.target,
            "runs": runs,
            "ratio": ratios.get("algorist"),
            "ratios": ratios,
        }
        measure.save_json(f"time-to-accuracy{kind}-1t", payload)


def _keep(file: Path, who: str, seed: int, start: Path, arguments: argparse.Namespace) -> None:
    """Train one arm in a process of its own, whose memory no other run has grown."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        run = train(who, seed, start, Path(temporary), arguments)
    file.write_text(json.dumps(run | {"target": arguments.target}), encoding="utf-8")


def _after_sft(folder: Path) -> Path:
    """Return the quickstart's model after its SFT."""
    own = [f"output_dir={folder}", "run_name=sft", "grpo.enabled=false", "eval.enabled=false"]
    run_recipe(load_recipe("quickstart", own).recipe)
    return folder / "sft" / "sft" / "final"


if __name__ == "__main__":
    main()
