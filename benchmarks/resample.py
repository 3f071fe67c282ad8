"""Seconds of GRPO until sampled answers are right to 75 %, where few groups carry a signal: plain, refill, filter, pools, replay.

    python benchmarks/resample.py [--seeds 5] [--hopeless 0.65] [--target 0.75] [--arms plain refill filter pools] [--save]
    python benchmarks/resample.py --model FOLDER --target 0.65 --arms plain refill [--rate 3e-5]  # a real model as it starts

The quickstart: its word problems, its model after its SFT, its GRPO with a constant learning rate. ``--hopeless`` of the training problems
have a wrong gold answer, so that their groups never carry a signal (0 is the quickstart as it is). The arms take turns, seed after
seed, from the same SFT model. Seconds are those of the processor (one thread), because other work on the machine then counts for
nothing; evaluation is left out; the filter's sampling of every problem is counted once in each of its runs.

``--model`` takes a chat model as it is, no SFT, and asks it for sums of numbers from 10 to 49; its answer is the last number it writes.
SmolLM2-135M-Instruct is right in 5 % of its samples then, and three groups of ten carry a signal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
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
from algorist.data.problems import Problems
from algorist.evaluation.run import EvaluationSetting, evaluate
from algorist.extensions.problem_sets.arithmetic import word_problems
from algorist.models.load import load_policy
from algorist.prompts.base import PromptFormat, Tags, add_format
from algorist.rewards import build_rewards
from algorist.rollouts import make_engine
from algorist.runs.asking import recipe_format
from algorist.runs.pipeline import run_recipe
from algorist.runs.rate import rate
from algorist.store.run_log import Quiet
from algorist.training.grpo_setup import make_grpo_trainer
from algorist.types import Parsed

EVERY, MAX_STEPS, SAMPLES, FEW = 5, 120, 4, 300
RATING_SECONDS: dict[Path, float] = {}
ARMS = {
    "plain": [],
    "refill": ["grpo.resample={max_rounds: 4, max_share: 4}"],
    "refill-all": ["grpo.resample={when_below: 1, max_rounds: 12, max_share: 12}"],
    "filter-few": ["data.train.pass_rate=[0.1,0.9]"],  # of the first FEW problems, which alone are rated
    "filter": ["data.train.pass_rate=[0.1,0.9]"],
    "pools": ["grpo.pools={solved: 8, hopeless: 8}"],
    "replay": ["grpo.replay={max_age: 4}"],
}


# For --model: short completions, products as its recipes have them.
REAL = [
    "prompt={format: last_number, system_prompt: 'Answer with <answer> number </answer>.'}", "rewards=[{name: correct}]",
    "model.compute_dtype=bfloat16", "grpo.max_completion_tokens=32", "grpo.batch_size=64",
]  # fmt: skip


class LastNumber(PromptFormat):
    """The answer is the last number of a chat model's reply."""

    def demonstrate(self, reasoning: str, answer: str) -> str:
        """Return the reasoning followed by the answer."""
        return f"{reasoning} {answer}"

    def parse(self, text: str) -> Parsed:
        """Read the last integer."""
        numbers = re.findall(r"-?\d+", text)
        return Parsed(text, numbers[-1] if numbers else None, bool(numbers), ())


def write_sums(path: Path, count: int, seed: int, *, split: str = "train", hopeless: float = 0.0) -> Path:
    """Write sums of two numbers from 10 to 49; one in five of all pairs is held out."""
    rng, pairs = random.Random(seed), [(a, b) for a in range(10, 50) for b in range(10, 50)]
    chosen = [(a, b) for a, b in pairs if ((8 * a + 7 * b) % 5 == 0) == (split == "test")]
    rows = [
        {"question": f"What is {a} + {b}?", "answer": str(a + b + (1000 if rng.random() < hopeless else 0))}
        for a, b in rng.sample(chosen, min(count, len(chosen)))
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


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


def train(
    arm: str, seed: int, model: Path, data: Path, held_out: Path, changes: list[str], target: float
) -> dict[str, Any]:
    """Train one arm until the target, below the folder of ``data``."""
    table, spent, folder = [], 0.0, data.parent
    if arm == "filter-few":
        lines = data.read_text(encoding="utf-8").splitlines()[:FEW]
        data = data.with_name("few.jsonl")
        data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if arm in ("filter", "filter-few"):
        began = time.process_time()
        path = rate(recipe_of(folder, data, *changes), samples=SAMPLES, model=model)
        # Later seeds find the table there; each pays for it all the same.
        spent = RATING_SECONDS.setdefault(path, time.process_time() - began)
        table = [f"data.train.pass_rates={path}"]
    recipe = recipe_of(folder, data, *changes, f"seed={seed}", *ARMS[arm], *table)
    form, device = recipe_format(recipe), torch.device("cpu")
    policy = load_policy(model, device=device, trainable=True, like=recipe.model)
    problems = Problems.load(recipe).train
    questions = Problems.load(recipe_of(folder, held_out, *changes)).train
    setting = EvaluationSetting(2, 1.0, 1.0, recipe.grpo.max_completion_tokens, 120, recipe.matcher, 7)

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
    parser.add_argument(
        "--first", type=int, default=1, help="first seed, to go on where an earlier call ended"
    )
    parser.add_argument("--hopeless", type=float, default=0.65)
    parser.add_argument("--target", type=float, default=0.75)
    parser.add_argument(
        "--arms", nargs="+", default=["plain", "refill", "filter", "pools"], choices=list(ARMS)
    )
    parser.add_argument("--model", type=Path, help="folder of a chat model that is trained as it is")
    parser.add_argument("--rate", default="3e-5", help="learning rate with --model")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write = write_sums if given.model else write_problems
        changes = [*REAL, f"grpo.learning_rate={given.rate}"] if given.model else []
        data = write(folder / "train.jsonl", 1000, 1, hopeless=given.hopeless)
        held_out = write(folder / "held-out.jsonl", 120, 99, split="test")
        if given.model:
            add_format(LastNumber(name="last_number", tags=Tags()))
        else:
            run_recipe(recipe_of(folder, data, "grpo.enabled=false", "run_name=sft"), display=Quiet())
        for seed in range(given.first, given.first + given.seeds):
            turn = seed % len(given.arms)
            for arm in given.arms[turn:] + given.arms[:turn]:
                start = given.model or folder / "sft" / "sft" / "final"
                run = train(arm, seed, start, data, held_out, changes, given.target)
                runs.append(run)
                print(
                    f"{arm:10} seed {seed}: {run['seconds']:6.1f} s, {run['steps']:3} steps, accuracy {run['last']:.3f}, useful "
                    f"{run['trained_useful_share']:.2f}{f', of these {t:.1f} s of rating' if (t := run['rating_seconds']) else ''}"
                    f"{'' if run['reached'] else ', target not reached'}",
                    flush=True,
                )
    found: dict[str, Any] = {
        "settings": {**vars(given), "model": given.model.name if given.model else None},
        "runs": runs,
    }
    times = {arm: [r["seconds"] for r in runs if r["arm"] == arm] for arm in given.arms}
    for arm in given.arms:
        rating = [r["rating_seconds"] for r in runs if r["arm"] == arm]
        if any(rating):  # the table is kept: without it, and with one for all runs
            bare = [took - spent for took, spent in zip(times[arm], rating, strict=True)]
            times[f"{arm} without its rating"] = bare
            times[f"{arm} with one rating for all"] = [took + rating[0] / len(bare) for took in bare]
    for arm in times:
        if arm != "plain" and "plain" in times and given.seeds > 1:
            found[arm] = measure.ratio_with_interval(times[arm], times["plain"])
            told = found[arm]
            print(
                f"{arm}: {told['ratio']:.3f}× of plain's [{told['low']:.3f}, {told['high']:.3f}], median {median(times[arm]):.1f} s"
            )
    if given.save:
        measure.save_json("resample-real-1t" if given.model else "resample-1t", found)


if __name__ == "__main__":
    main()
