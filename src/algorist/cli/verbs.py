"""The verbs: what each does in a line, and the file that it is imported from when it runs."""

from __future__ import annotations

import importlib
from typing import Any

VERBS = {
    "new": "Write a recipe and a reward for your data file: looks at it, asks what it cannot see.",
    "preflight": "Look at a recipe before training: batches, pass rates, memory, time, advice.",
    "run": "Run a recipe, or one stage of it, in one process or several: SFT, GRPO, evaluations.",
    "iterate": "Expert iteration: sample, keep what is right, SFT on it, evaluate; in rounds.",
    "eval": "Evaluate a run, a checkpoint or a model on held-out problems.",
    "solve": "Answer questions with a run, a checkpoint or a model; without a question, converse.",
    "serve": "Serve a model with OpenAI-compatible endpoints (vLLM or transformers).",
    "grade": "Grade an answer or a completion, with the reason.",
    "regrade": "Grade the stored rollouts of a run again and show what changes.",
    "rewards": "List the rewards; explain the reward of a completion.",
    "data": "List, show, check, rate, sample and compare datasets.",
    "inspect": "Browse or query the stored rollouts of a run.",
    "watch": "Watch a run from another window: where it is, its curves, what is wrong.",
    "diagnose": "Say why a run does not learn, with evidence and the lines to change.",
    "compare": "Compare two evaluations with paired intervals.",
    "export": "Export a model: merge adapters, write a card, convert to GGUF, upload.",
    "report": "Write a run's report.html: one file, opens offline.",
    "recipes": "List and show recipes, and where each value comes from.",
    "doctor": "Check the environment: versions, devices, optional engines.",
    "completion": "Print the shell's completion of verbs, options, recipes and runs.",
}

TOGETHER = {
    "regrade": "grade",
    "rewards": "grade",
    "report": "watch",
    "doctor": "diagnose",
}
"""Verbs that stand in another one's file, as ``VERB_app``."""
COMPLETE = "_ALGORIST_COMPLETE"
"""Variable by which a shell asks for completions."""


def app_of(verb: str) -> Any:
    """Return a verb's typer application."""
    module = importlib.import_module(f"algorist.cli.{TOGETHER.get(verb, verb)}_command")
    return getattr(module, f"{verb}_app" if verb in TOGETHER else "app")
