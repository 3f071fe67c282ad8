"""Seconds of GRPO until sampled answers are right to 75 %, where few groups carry a signal: plain, refill, filter, pools, replay.

    python benchmarks/resample.py [--seeds 5] [--hopeless 0.65] [--target 0.75] [--arms plain refill filter pools] [--save]

The quickstart: its word problems, its model after its SFT, its GRPO with a constant learning rate. ``--hopeless`` of the training problems
have a wrong gold answer, so that their groups never carry a signal (0 is the quickstart as it is). The arms take turns, seed after
seed, from the same SFT model. Seconds are those of the processor (one thread), because other work on the machine then counts for
nothing; evaluation is left out; the filter's sampling of every problem is counted once in each of its runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import measure
import torch
from transformers import TrainerCallback

from algorist.config.load import load_recipe
from algorist.data.arithmetic import word_problems
from algorist.evaluation.run import EvaluationSetting, evaluate
from algorist.models.load import load_policy
from algorist.prompts.of_recipe import recipe_format
from algorist.rewards import build_rewards
from algorist.rollouts import make_engine
from algorist.runs.pass_rates import rate
from algorist.runs.pipeline import run_recipe
from algorist.runs.plan import Problems
from algorist.store.run_log import Quiet
from algorist.training.grpo_setup import make_grpo_trainer

EVERY, MAX_STEPS, SAMPLES = 5, 120, 4
ARMS = {
    "plain": [],
    "refill": ["grpo.resample={max_rounds: 4, max_share: 4}"],
    "filter": ["data.train.pass_rate=[0.1,0.9]"],
    "pools": ["grpo.pools={solved: 8, hopeless: 8}"],
    "replay": ["grpo.replay={max_age: 4}"],
}


def write_problems(path: Path, count: int, seed: int, *, split: str = "train", hopeless: float = 0.0) -> Path:
    """Write the quickstart's problems; a hopeless one has a gold answer that nothing leads to."""
    rng, rows = random.Random(seed), []
    for problem in word_problems(count, seed=seed, split=split):
        gold = int(problem.answer) + (1000 if rng.random() < hopeless else 0)
        rows.append({"question": problem.question, "answer": str(gold)})
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


class Clock(TrainerCallback):
    """Counts processor seconds without evaluation; stops at the target; keeps the share of trained groups that carry a signal."""

    def __init__(self, accuracy: Any, target: float, spent: float) -> None:
        self.accuracy, self.target, self.seconds, self.reached = accuracy, target, spent, False
        self.useful: list[float] = []
        self.last = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Evaluate with the clock stopped."""
        if state.global_step % EVERY:
            return control
        self.seconds += time.process_time() - self._began
        self.last = self.accuracy()
        if self.last >= self.target:
            self.reached = control.should_training_stop = True
        self._began = time.process_time()
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep the useful share."""
        share = (logs or {}).get("groups/trained_useful_share", (logs or {}).get("groups/useful_share"))
        if share is not None:
            self.useful.append(share)


def recipe_of(folder: Path, data: Path, *changes: str) -> Any:
    """Return the recipe of a run below ``folder``."""
    common = [
        "eval.enabled=false", f"output_dir={folder}", f"data.train={{name: local, path: {data}}}", f"grpo.max_steps={MAX_STEPS}",
        "grpo.save_steps=100000", "grpo.lr_scheduler=constant_with_warmup",
    ]  # fmt: skip
    return load_recipe("quickstart", [*common, *changes]).recipe


def train(arm: str, seed: int, model: Path, data: Path, folder: Path, target: float) -> dict[str, Any]:
    """Train one arm until the target."""
    table, spent = [], 0.0
    if arm == "filter":
        began = time.process_time()
        path = rate(recipe_of(folder, data), samples=SAMPLES, model=model)
        table, spent = [f"data.train.pass_rates={path}"], time.process_time() - began
    recipe = recipe_of(folder, data, f"seed={seed}", *ARMS[arm], *table)
    form, device = recipe_format(recipe), torch.device("cpu")
    policy, problems = load_policy(model, device=device, trainable=True), Problems.load(recipe).train
    held_out = write_problems(folder / "held-out.jsonl", 120, 99, split="test")
    questions = Problems.load(recipe_of(folder, held_out)).train
    setting = EvaluationSetting(2, 1.0, 1.0, 80, 120, recipe.matcher, 7)

    def accuracy() -> float:
        engine = make_engine("auto", policy.model, policy.tokenizer)
        rows = evaluate(engine, policy.tokenizer, questions, form, setting, greedy=False)
        return mean(bool(row["correct"]) for row in rows)

    clock = Clock(accuracy, target, spent)
    trainer = make_grpo_trainer(
        model=policy.model, tokenizer=policy.tokenizer, problems=problems, prompt_format=form, section=recipe.grpo,
        rewards=build_rewards(recipe.rewards, form, matcher=recipe.matcher), device=device, seed=seed, callbacks=[clock],
        engine=make_engine("auto", policy.model, policy.tokenizer), output_dir=folder / f"{arm}-{seed}",
    )  # fmt: skip
    trainer.train()
    return {
        "arm": arm, "seed": seed, "reached": clock.reached, "seconds": clock.seconds, "rating_seconds": spent,
        "steps": trainer.state.global_step, "last": clock.last, "trained_useful_share": mean(clock.useful),
    }  # fmt: skip


def main() -> None:
    """Print one line per run, and each arm's time against plain."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hopeless", type=float, default=0.65)
    parser.add_argument("--target", type=float, default=0.75)
    parser.add_argument(
        "--arms", nargs="+", default=["plain", "refill", "filter", "pools"], choices=list(ARMS)
    )
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_problems(folder / "train.jsonl", 1000, 1, hopeless=given.hopeless)
        run_recipe(recipe_of(folder, data, "grpo.enabled=false", "run_name=sft"), display=Quiet())
        for seed in range(1, given.seeds + 1):
            turn = seed % len(given.arms)
            for arm in given.arms[turn:] + given.arms[:turn]:
                run = train(arm, seed, folder / "sft" / "sft" / "final", data, folder, given.target)
                runs.append(run)
                print(
                    f"{arm:7} seed {seed}: {run['seconds']:6.1f} s, {run['steps']:3} steps, accuracy {run['last']:.3f}, useful "
                    f"{run['trained_useful_share']:.2f}{'' if run['reached'] else ', target not reached'}",
                    flush=True,
                )
    found: dict[str, Any] = {"settings": vars(given), "runs": runs}
    times = {arm: [r["seconds"] for r in runs if r["arm"] == arm] for arm in given.arms}
    for arm in given.arms:
        if arm != "plain" and "plain" in times and given.seeds > 1:
            found[arm] = measure.ratio_with_interval(times[arm], times["plain"])
            told = found[arm]
            print(
                f"{arm}: {told['ratio']:.3f}× of plain's [{told['low']:.3f}, {told['high']:.3f}], median {median(times[arm]):.1f} s"
            )
    if given.save:
        measure.save_json("resample-1t", found)


if __name__ == "__main__":
    main()
