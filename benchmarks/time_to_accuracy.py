"""Seconds of GRPO until the quickstart task is solved to 80 % (held-out, greedy): algorist against stock TRL.

    python benchmarks/time_to_accuracy.py [--seeds 3] [--target 0.8] [--save]

Both start from the same SFT model and train with the same problems, rewards and hyperparameters; TRL in its faster setting
(float32, no gradient checkpointing, ``generate``). The held-out accuracy is measured every ten steps with the same code, and its
time is left out. The runs take turns, one seed after the other, one thread.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import measure
import torch
from stock_trl import make_stock_trainer
from transformers import TrainerCallback

from algorist.config.load import load_recipe
from algorist.data.problems import Problems
from algorist.evaluation.run import EvaluationSetting, evaluate
from algorist.models.load import load_policy
from algorist.rewards import build_rewards
from algorist.rollouts import make_engine
from algorist.runs.asking import recipe_format
from algorist.runs.pipeline import run_recipe
from algorist.training.grpo_setup import make_grpo_trainer

EVERY, MAX_STEPS = 10, 240


class Clock(TrainerCallback):
    """Counts the seconds of training without evaluation; stops the training at the target."""

    def __init__(self, accuracy: Any, target: float) -> None:
        self.accuracy, self.target = accuracy, target
        self.seconds = 0.0
        self.curve: list[tuple[int, float, float]] = []
        self.reached: float | None = None
        self._began = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Evaluate every ten steps, with the clock stopped."""
        if state.global_step % EVERY:
            return control
        self.seconds += time.perf_counter() - self._began
        found = self.accuracy()
        self.curve.append((state.global_step, round(self.seconds, 2), found))
        if found >= self.target and self.reached is None:
            self.reached = self.seconds
            control.should_training_stop = True
        self._began = time.perf_counter()
        return control


def train(who: str, seed: int, model: Path, target: float, folder: Path) -> dict[str, Any]:
    """Train one of the two until the target; return seconds and the curve."""
    recipe = load_recipe("quickstart", [f"seed={seed}"]).recipe
    device, form = torch.device("cpu"), recipe_format(recipe)
    policy, data = load_policy(model, device=device, trainable=True), Problems.load(recipe)
    setting = EvaluationSetting.from_section(
        recipe.eval.model_copy(update={"samples": 0}),
        max_tokens=recipe.grpo.max_completion_tokens,
        matcher=recipe.matcher,
        seed=seed,
    )

    def accuracy() -> float:
        mode = policy.model.training
        policy.model.eval()
        samples = evaluate(
            make_engine("auto", policy.model, policy.tokenizer),
            policy.tokenizer,
            data.held_out,
            form,
            setting,
        )
        policy.model.train(mode)
        return sum(s["correct"] for s in samples) / len(samples)

    clock = Clock(accuracy, target)
    ours = who == "algorist"  # TRL samples with its own generation
    trainer: Any = (make_grpo_trainer if ours else make_stock_trainer)(
        model=policy.model,
        tokenizer=policy.tokenizer,
        problems=data.train,
        prompt_format=form,
        section=recipe.grpo.model_copy(update={"save_steps": 10**9, "max_steps": MAX_STEPS}),
        rewards=build_rewards(recipe.rewards, form, matcher=recipe.matcher),
        engine=make_engine("auto", policy.model, policy.tokenizer) if ours else None,
        output_dir=folder,
        seed=seed,
        device=device,
        callbacks=[clock],
    )
    trainer.train()
    return {
        "who": who,
        "seed": seed,
        "seconds": clock.reached,
        "steps": clock.curve[-1][0],
        "seconds_per_step": clock.curve[-1][1] / clock.curve[-1][0],
        "curve": clock.curve,
    }


def main() -> None:
    """Print one line per run and the ratio of the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe(
            "quickstart", [f"output_dir={folder}", "run_name=sft", "grpo.enabled=false", "eval.enabled=false"]
        )
        run_recipe(recipe.recipe)
        for seed in range(1, given.seeds + 1):
            for who in ("algorist", "trl") if seed % 2 else ("trl", "algorist"):
                run = train(
                    who,
                    seed,
                    Path(folder) / "sft" / "sft" / "final",
                    given.target,
                    Path(folder) / f"{who}-{seed}",
                )
                runs.append(run)
                print(
                    f"{who:9} seed {seed}: {run['seconds'] and round(run['seconds'], 1)} s to {given.target:.0%}, "
                    f"{run['steps']} steps, {run['seconds_per_step']:.3f} s per step",
                    flush=True,
                )
    times = {
        who: [r["seconds"] for r in runs if r["who"] == who and r["seconds"]] for who in ("algorist", "trl")
    }
    if all(len(t) == given.seeds for t in times.values()):
        ratio = measure.ratio_with_interval(times["algorist"], times["trl"])
        print(
            f"time to {given.target:.0%}: {ratio['ratio']:.3f}× of TRL's [{ratio['low']:.3f}, {ratio['high']:.3f}], n = {ratio['n']}"
        )
    else:
        ratio = None
    if given.save:
        measure.save_json("time-to-accuracy-1t", {"target": given.target, "runs": runs, "ratio": ratio})


if __name__ == "__main__":
    main()
