"""Tasksets of verifiers: ``taskset.py`` is the dataset, the reward and the checker ``verifiers``; ``taskset_worker.py`` runs in their Python."""

from __future__ import annotations

from algorist_grader.registry import add_module

add_module(f"{__name__}.taskset", "dataset", "reward", "checker")
