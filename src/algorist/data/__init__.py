"""Datasets: one adapter per file turns rows into problems."""

from algorist.data import arithmetic, gsm8k, local, math  # noqa: F401
from algorist.data.base import DATASETS, Source, dataset
from algorist.data.select import load_problems, overlap

__all__ = ["DATASETS", "Source", "dataset", "load_problems", "overlap"]
