"""Datasets: an adapter turns rows into problems; a published dataset is a row of the table in ``adapters``."""

from algorist.data.base import DATASETS, Source, dataset
from algorist.data.load import load_problems, with_solutions

__all__ = ["DATASETS", "Source", "dataset", "load_problems", "with_solutions"]
