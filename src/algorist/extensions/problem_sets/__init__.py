"""Problems that are made: arithmetic in words, countdown, story problems, reasoning-gym; and mixtures of sets."""

from __future__ import annotations

from algorist_grader.registry import add_module

for _name in ("arithmetic", "countdown", "mixture", "reasoning_gym", "story_problems"):
    add_module(f"{__name__}.{_name}", "dataset")
