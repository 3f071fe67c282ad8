# /// script
# requires-python = ">=3.11"
# dependencies = ["algorist"]
#
# [tool.uv.sources]
# algorist = { path = ".." }
# ///
"""The quickstart as one script: a tiny model learns word problems, before and after, in minutes on a CPU.

    uv run examples/quickstart.py                  # uv installs what the block above names, into an environment of its own
    python examples/quickstart.py [key=value …]    # where algorist is installed

On Linux `uv run` takes the package index's torch, which is CUDA's and gigabytes larger. Another build is to be had by uv's pip:

    uv venv && uv pip install --torch-backend=cpu . && .venv/bin/python examples/quickstart.py

Settings are those of a recipe, for example grpo.max_steps=20. Beside a published wheel the last three lines of the block can go.
"""

from __future__ import annotations

import sys
import warnings

from transformers.utils import logging

from algorist.config import load_recipe
from algorist.runs.pipeline import run_recipe
from algorist.runs.solve import Solver

QUESTION = (
    "Ben starts with 7 eggs. Ben buys 3 boxes of 4. Ben buys 3 boxes of 2. How many eggs are left for Ben?"
)


def main(*overrides: str) -> None:
    """Run the recipe, then print accuracy before and after GRPO and one answer of each model."""
    warnings.filterwarnings(
        "ignore", category=FutureWarning
    )  # of libraries, as their bars: not between the run's lines
    logging.disable_progress_bar()
    run = run_recipe(load_recipe("quickstart", overrides).recipe)
    for stage, metrics in run.summaries.items():
        solver = Solver.load(run.folder.path / stage / "final")
        (row,) = solver.solve([QUESTION], max_new_tokens=80, temperature=0)
        print(f"{stage}: {metrics['greedy_accuracy'].text('greedy_accuracy')}; {row['completion']!r}")
    print(f"the report: {run.folder.path / 'report.html'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
