"""A dataset of your own: one function from a source to problems, then a run that trains on it.

    python examples/own_dataset.py [key=value …]

Settings are those of a recipe, for example grpo.max_steps=300. To keep the dataset, put the function into a file in
src/algorist/data/ and name the file in src/algorist/data/__init__.py; recipes and `algorist data` then know it.
"""

from __future__ import annotations

import sys

from algorist.config import load_recipe
from algorist.data import Source, dataset
from algorist.runs.pipeline import run_recipe
from algorist.types import Problem


@dataset("larger")
def larger(source: Source) -> list[Problem]:
    """The larger of two numbers from 10 up to the parameter `top` (99); every tenth pair is in the test split."""
    numbers = range(10, int(source.params.get("top", 99)) + 1)
    held_out = source.split == "test"
    return [
        Problem(f"{a},{b}", f"Which is larger, {a} or {b}?", str(max(a, b)), f"{max(a, b)} > {min(a, b)}")
        for a in numbers
        for b in numbers
        if a != b and ((3 * a + b) % 10 == 0) == held_out
    ]


def main(*overrides: str) -> None:
    """Train the tiny model on comparisons and print the accuracy with its interval."""
    settings = [
        "name=larger",
        "data={train: {name: larger, shuffle_seed: 1}, eval: {name: larger, split: test, shuffle_seed: 1, limit: 100}}",
        "sft.max_steps=800",
        "grpo.max_steps=20",
    ]
    run = run_recipe(load_recipe("quickstart", [*settings, *overrides]).recipe)
    for stage, metrics in run.summaries.items():
        right = metrics["greedy_accuracy"]
        print(f"{stage}: {right.value:.3f}, 95 % interval {right.low:.3f} … {right.high:.3f}, n = {right.n}")
    print(f"the run is in {run.folder.path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
