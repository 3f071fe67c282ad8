"""The verbs: what each does in a line, and the file that it is imported from when it runs; those of extensions come last.

An extension brings a verb as a file ``VERB_command`` in its folder, whose docstring begins with the line. Nothing is imported to find it.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OF_CORE = {
    "tour": "Show the way from nothing to your own model, command by command.",
    "new": "Look at your data file, and write a recipe and a reward for it.",
    "from-trl": "Write the recipe of a training script for TRL.",
    "preflight": "Before training: does it fit, how long, will it learn, advice.",
    "run": "Run a recipe, or one stage of it: SFT, GRPO, evaluations.",
    "eval": "Evaluate a run, a checkpoint or a model on held-out problems.",
    "solve": "Answer questions with a model; without a question, converse.",
    "grade": "Grade an answer or a completion, with the reason.",
    "rewards": "List rewards; explain or audit what one pays.",
    "data": "List, show, check, rate, sample and compare datasets.",
    "inspect": "Browse or query the stored rollouts of a run.",
    "watch": "Watch a run from another window: where it is, what is wrong.",
    "diagnose": "Say why a run does not learn, and which lines to change.",
    "compare": "Compare two evaluations with paired intervals.",
    "report": "Write a run's report.html: one file, opens offline.",
    "recipes": "List and show recipes, and where each value comes from.",
    "doctor": "Check the environment: versions, devices, optional engines.",
    "completion": "Print the shell's completion of verbs, options, recipes and runs.",
}

TOGETHER = {"rewards": "grade", "report": "watch", "doctor": "diagnose"}
"""Verbs that stand in another one's file, as ``VERB_app``."""
COMPLETE = "_ALGORIST_COMPLETE"
"""Variable by which a shell asks for completions."""


def _packages() -> Iterator[tuple[str, Path]]:
    """Yield the name and folder of each extension that is a package: ours, and those that are installed."""
    group = "algorist.extensions"
    for folder in sorted(Path(__file__).parents[1].glob("extensions/*/")):
        yield f"{group}.{folder.name}", folder
    for point in entry_points(group=group):
        spec = find_spec(point.module)
        yield from (
            (point.module, Path(folder)) for folder in (spec and spec.submodule_search_locations) or ()
        )


FILES = {
    file.stem.removesuffix("_command"): (f"{package}.{file.stem}", file)
    for package, folder in _packages()
    for file in sorted(folder.glob("*_command.py"))
}
"""Verbs of extensions → module and file."""
VERBS = OF_CORE | {
    verb: (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    for verb, (_, file) in FILES.items()
    if verb not in OF_CORE
}


def app_of(verb: str) -> Any:
    """Return a verb's typer application."""
    file = TOGETHER.get(verb, verb).replace("-", "_")
    name = f"algorist.cli.{file}_command" if verb in OF_CORE else FILES[verb][0]
    module = importlib.import_module(name)
    return getattr(module, f"{verb}_app" if verb in TOGETHER else "app")
