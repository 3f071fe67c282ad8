"""The stages of a run: each one's name is its folder in the run, its section in the recipe and its evaluation's name."""

from __future__ import annotations

from typing import Literal, get_args

Stage = Literal["sft", "grpo"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""In the order in which they are done."""
LAST_FIRST: tuple[Stage, ...] = STAGES[::-1]
EVALUATED = ("base", *STAGES)
"""What the evaluations between the stages are called; ``base`` is the model before any of them."""
