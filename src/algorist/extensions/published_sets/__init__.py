"""Published datasets: GSM8K, MATH, AIME, …, and the first problems of SVAMP, which come with the package."""

from __future__ import annotations

from algorist_grader.registry import add_module

add_module(f"{__name__}.published", "dataset")
