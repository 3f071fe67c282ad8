"""Rollouts: prompts in, groups of completions with their log-probs out. ``make_engine`` chooses who does it."""

from algorist.rollouts.base import Completion, RolloutEngine, SamplingParams
from algorist.rollouts.engines import make_engine

__all__ = ["Completion", "RolloutEngine", "SamplingParams", "make_engine"]
