"""How much of the gap to its teacher a student closes, and GRPO in the same processor seconds, on the quickstart.

    python benchmarks/teacher.py --out runs/teacher --seeds 3            # trains student and teacher first: minutes
    python benchmarks/teacher.py --out runs/teacher --seeds 2 --teacher-steps 30 --steps 20

The student is the quickstart after SFT, the teacher the same after GRPO. GRPO, with the quickstart's own settings, gets as many steps as
take the processor seconds of the slowest distillation of that seed, by a trial of 8 steps. Gap closed: (student after - before) / (teacher - before), in pass@1 of the sampled
completions on the quickstart's held-out problems. Seconds are processor seconds of the stage without evaluation; one thread.
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

TRIAL = 8
"""Steps of GRPO that say what one takes."""


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
    settings = [f"model.name={run / 'grpo' / 'final'}", "sft.enabled=false", "grpo.enabled=false"]
    base = ["eval.baseline=true", f"output_dir={out}", f"run_name={name}", "device=cpu", "threads=1"]
    run_recipe(load_recipe("quickstart", [*settings, *base, f"seed={seed}"]).recipe)
    return rates(out / name, "base")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/teacher"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--teacher-steps", type=int, default=120, help="GRPO steps of the teacher")
    parser.add_argument("--steps", type=int, default=40, help="steps of distillation")
    parser.add_argument("--losses", nargs="+", default=["sampled", "full"])
    options = parser.parse_args()
    out = options.out.resolve()
    first, teacher = out / "student", out / "teacher"
    place = [f"output_dir={out}", "device=cpu", "threads=1"]
    if not (first / "sft" / "final").exists():
        only_sft = ["run_name=student", "grpo.enabled=false", "eval.enabled=false"]
        run_recipe(load_recipe("quickstart", [*place, *only_sft]).recipe)
    student = [f"model.name={first / 'sft' / 'final'}", "sft.enabled=false"]
    if not (teacher / "eval" / "grpo.json").exists():
        own = ["run_name=teacher", f"grpo.max_steps={options.teacher_steps}", "eval.baseline=true"]
        run_recipe(load_recipe("quickstart", [*place, *student, *own]).recipe)
    before, best = rates(teacher, "base"), rates(teacher, "grpo")
    start, goal = sum(before) / len(before), sum(best) / len(best)
    print(f"student {start:.1%}, teacher {goal:.1%} of {len(before)} problems × 8")
    _, seconds = train(out, "trial", "quickstart", *student, f"grpo.max_steps={TRIAL}")
    of_grpo = seconds / TRIAL
    result: dict[str, Any] = {"before": start, "teacher": goal, "runs": []}
    for seed in range(1, options.seeds + 1):
        slowest = 0.0
        for loss in [*options.losses, "grpo"]:
            name = f"{loss}-{seed}"
            if loss == "grpo":
                count = max(1, round(slowest / of_grpo))
                run, seconds = train(
                    out, name, "quickstart", *student, f"seed={seed}", f"grpo.max_steps={count}"
                )
            else:
                count = options.steps
                settings = [f"seed={seed}", f"grpo.max_steps={count}"]
                settings.append(f"grpo.teacher={{model: '{teacher}', loss: {loss}}}")
                run, seconds = train(out, name, "quickstart-distill", *student, *settings)
                slowest = max(slowest, seconds)
            after = score(out, run, seed)
            rate = sum(after) / len(after)
            gain = paired_difference(before, after)
            row = {"name": loss, "seed": seed, "steps": count, "seconds": seconds, "pass@1": rate}
            row |= {"gap_closed": (rate - start) / (goal - start), "gain": [gain.value, gain.low, gain.high]}
            result["runs"].append(row)
            print(
                f"{loss:8} seed {seed}: {count} steps, {seconds:.0f} s, pass@1 {rate:.1%} "
                f"({gain.value:+.1%} [{gain.low:+.1%}, {gain.high:+.1%}]), gap closed {row['gap_closed']:.0%}",
                flush=True,
            )
    (out / "teacher.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
