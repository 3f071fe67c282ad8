"""Evaluate a run or a model on a file of your own and print accuracy and pass@k with their intervals.

    python examples/evaluate_model.py runs/quickstart test.jsonl

The file has the columns question and answer. A model folder or a hub name works as well: it is asked in the format
`reasoning_answer`.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from algorist.config import load_recipe
from algorist.config.schema import DatasetSection, EvalSection
from algorist.data import load_problems
from algorist.evaluation.estimators import summarise
from algorist.evaluation.run import EvaluationSetting, evaluate
from algorist.rollouts import make_engine
from algorist.runs.solve import Solver


def load(model: str) -> Solver:
    """Return the last stage of a run with its recipe, or any other model."""
    folder = Path(model)
    if not (folder / "config.yaml").is_file():
        return Solver.load(folder if folder.is_dir() else model)
    stage = "grpo" if (folder / "grpo" / "final").is_dir() else "sft"
    return Solver.load(folder / stage / "final", recipe=load_recipe(str(folder / "config.yaml")).recipe)


def main(model: str, file: str) -> None:
    """Print each metric with its 95 % interval, and the grading reasons."""
    problems = load_problems(DatasetSection(name="local", path=file, split="test"))
    solver = load(model)
    tokenizer = solver.policy.tokenizer
    engine = make_engine("auto", solver.policy.model, tokenizer)
    setting = EvaluationSetting.from_section(
        EvalSection(samples=4), max_tokens=solver.max_new_tokens, matcher="symbolic", seed=0
    )
    samples = evaluate(engine, tokenizer, problems, solver.prompt_format, setting)
    for name, found in summarise(samples, ks=[1, 4]).items():
        print(f"{name:<18} {found.value:8.3f}  [{found.low:.3f}, {found.high:.3f}]  n = {found.n}")
    reasons = Counter(row["reason"] for row in samples if row["greedy"])
    print(", ".join(f"{reason} {count}" for reason, count in reasons.most_common()))


if __name__ == "__main__":
    main(*sys.argv[1:3])
