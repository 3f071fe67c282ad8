"""The verbs: what each does in a line, and the file that it is imported from when it runs."""

from __future__ import annotations

import importlib
from typing import Any

VERBS = {
    "tour": "Show the way from nothing to your own model, command by command.",
    "new": "Look at your data file, and write a recipe and a reward for it.",
    "preflight": "Before training: does it fit, how long, will it learn, advice.",
    "run": "Run a recipe, or one stage of it: SFT, GRPO, evaluations.",
    "iterate": "Expert iteration: sample, keep what is right, SFT on it, again.",
    "eval": "Evaluate a run, a checkpoint or a model on held-out problems.",
    "solve": "Answer questions with a model; without a question, converse.",
    "serve": "Serve a model with OpenAI-compatible endpoints.",
    "grade": "Grade an answer or a completion, with the reason.",
    "regrade": "Grade a run's stored rollouts again and show what changes.",
    "rewards": "List rewards; explain or audit what one pays.",
    "data": "List, show, check, rate, sample and compare datasets.",
    "inspect": "Browse or query the stored rollouts of a run.",
    "watch": "Watch a run from another window: where it is, what is wrong.",
    "diagnose": "Say why a run does not learn, and which lines to change.",
    "compare": "Compare two evaluations with paired intervals.",
    "export": "Write a model for others: merged, a card, GGUF files, upload.",
    "report": "Write a run's report.html: one file, opens offline.",
    "recipes": "List and show recipes, and where each value comes from.",
    "doctor": "Check the environment: versions, devices, optional engines.",
    "completion": "Print the shell's completion of verbs, options, recipes and runs.",
}

TOGETHER = {"regrade": "grade", "rewards": "grade", "report": "watch", "doctor": "diagnose"}
"""Verbs that stand in another one's file, as ``VERB_app``."""
COMPLETE = "_ALGORIST_COMPLETE"
"""Variable by which a shell asks for completions."""


def app_of(verb: str) -> Any:
    """Return a verb's typer application."""
    module = importlib.import_module(f"algorist.cli.{TOGETHER.get(verb, verb)}_command")
    return getattr(module, f"{verb}_app" if verb in TOGETHER else "app")
