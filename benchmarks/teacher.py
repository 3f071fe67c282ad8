"""How much of the gap to its teacher a student closes, and GRPO in the same processor seconds, on the quickstart.

    python benchmarks/teacher.py --out runs/teacher --seeds 5            # trains student and teacher first: minutes
    python benchmarks/teacher.py --out runs/teacher --seeds 2 --steps 20

The teacher is the quickstart's model after SFT and GRPO; the student a model of a third of its parameters after the same SFT (--width 96:
of the same size). GRPO, with the quickstart's own settings, gets as many steps as take the processor seconds of the slowest distillation of
that seed, by two trials. Gap closed: (student after - before) / (teacher - before), in pass@1 of the sampled completions on the
quickstart's held-out problems. Seconds are processor seconds of the stage without evaluation; one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from algorist.config.load import load_recipe
from algorist.evaluation.artifact import read_artifact
from algorist.evaluation.estimators import paired_difference, sampled_groups
from algorist.runs.pipeline import run_recipe

TRIALS = 4, 20
"""Steps of the two trials of GRPO that say what one takes, and what the start."""


def rates(run: Path, name: str) -> list[float]:
    """Return the share of right sampled completions of each held-out problem."""
    groups = sampled_groups(read_artifact(run / "eval", name).samples)
    return [sum(bool(row["correct"]) for row in groups[key]) / len(groups[key]) for key in sorted(groups)]


def train(out: Path, name: str, recipe: str, *settings: str) -> tuple[Path, float]:
    """Run GRPO's stage; return the run and its processor seconds."""
    loaded = load_recipe(
        recipe, [f"output_dir={out}", f"run_name={name}", "device=cpu", "threads=1", *settings]
    )
    began = time.process_time()
    run_recipe(
        loaded.recipe.model_copy(update={"eval": loaded.recipe.eval.model_copy(update={"enabled": False})})
    )
    seconds = time.process_time() - began
    return out / name, seconds


def score(out: Path, run: Path, seed: int) -> list[float]:
    """Evaluate a run's final model on the quickstart's held-out problems."""
    name = f"{run.name}-eval"
    final = next(path for stage in ("grpo", "sft") if (path := run / stage / "final").is_dir())
    settings = [f"model.name={final}", "sft.enabled=false", "grpo.enabled=false"]
    base = ["eval.baseline=true", f"output_dir={out}", f"run_name={name}", "device=cpu", "threads=1"]
    run_recipe(load_recipe("quickstart", [*settings, *base, f"seed={seed}"]).recipe)
    return rates(out / name, "base")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/teacher"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--width", type=int, default=48, help="hidden size of the student; the teacher's is 96"
    )
    parser.add_argument("--steps", type=int, help="steps of distillation; the recipe's when left out")
    parser.add_argument("--losses", nargs="+", default=["sampled", "full"])
    options = parser.parse_args()
    out = options.out.resolve()
    first, teacher = out / "student", out / "teacher"
    place = [f"output_dir={out}", "device=cpu", "threads=1", "eval.enabled=false"]
    if not (first / "sft" / "final").exists():
        small = ["run_name=student", f"model.tiny.hidden_size={options.width}", "grpo.enabled=false"]
        run_recipe(load_recipe("quickstart", [*place, *small]).recipe)
    if not (teacher / "grpo" / "final").exists():
        run_recipe(load_recipe("quickstart", [*place, "run_name=teacher"]).recipe)
    student = [f"model.name={first / 'sft' / 'final'}", "sft.enabled=false"]
    before, best = score(out, first, 42), score(out, teacher, 42)
    start, goal = mean(before), mean(best)
    print(f"student {start:.1%}, teacher {goal:.1%} of {len(before)} problems × 8", flush=True)
    short, long = (train(out, f"trial-{n}", "quickstart", *student, f"grpo.max_steps={n}")[1] for n in TRIALS)
    of_step = (long - short) / (TRIALS[1] - TRIALS[0])
    own = [] if options.steps is None else [f"grpo.max_steps={options.steps}"]
    result: dict[str, Any] = {"before": start, "teacher": goal, "runs": []}
    for seed in range(1, options.seeds + 1):
        slowest = 0.0
        for loss in [*options.losses, "grpo"]:
            name = f"{loss}-{seed}"
            if loss == "grpo":
                count = max(1, round(TRIALS[0] + (slowest - short) / of_step))
                own_steps = [f"seed={seed}", f"grpo.max_steps={count}"]
                run, seconds = train(out, name, "quickstart", *student, *own_steps)
            else:
                settings = [f"seed={seed}", f"grpo.teacher.model='{teacher}'", f"grpo.teacher.loss={loss}"]
                run, seconds = train(out, name, "quickstart-distill", *student, *settings, *own)
                slowest = max(slowest, seconds)
            after = score(out, run, seed)
            gain = paired_difference(before, after)
            row = {"name": loss, "seed": seed, "seconds": seconds, "pass@1": mean(after)}
            row |= {
                "gap_closed": (mean(after) - start) / (goal - start),
                "gain": [gain.value, gain.low, gain.high],
            }
            result["runs"].append(row)
            print(
                f"{loss:8} seed {seed}: {seconds:.0f} s, pass@1 {mean(after):.1%} "
                f"({gain.value:+.1%} [{gain.low:+.1%}, {gain.high:+.1%}]), gap closed {row['gap_closed']:.0%}",
                flush=True,
            )
    for loss in options.losses:
        closed = {
            name: [row["gap_closed"] for row in result["runs"] if row["name"] == name]
            for name in (loss, "grpo")
        }
        if options.seeds > 1:
            more = paired_difference(closed["grpo"], closed[loss])
            result[f"{loss} - grpo"] = [more.value, more.low, more.high]
            print(
                f"{loss} closes {mean(closed[loss]):.0%}, {100 * more.value:+.0f} points more than GRPO "
                f"[{100 * more.low:+.0f}, {100 * more.high:+.0f}] over {options.seeds} seeds"
            )
    (out / "teacher.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
