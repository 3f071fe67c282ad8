"""Datasets: one adapter per file turns rows into problems."""

from algorist.data import (  # noqa: F401
    arithmetic,
    benchmarks,
    competitions,
    countdown,
    dapo,
    equations,
    gsm8k,
    local,
    math,
    mixture,
    reasoning_gym,
    reasoning_traces,
    rollouts,
    story_problems,
)
from algorist.data.base import DATASETS, Source, dataset
from algorist.data.leakage import overlap, shared_questions
from algorist.data.load import load_problems, with_solutions

__all__ = ["DATASETS", "Source", "dataset", "load_problems", "overlap", "shared_questions", "with_solutions"]
