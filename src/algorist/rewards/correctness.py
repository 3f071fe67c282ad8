"""Rewards for being right."""

from __future__ import annotations

from algorist.grading import grade_completion, numeric_value
from algorist.rewards.base import RewardInput, reward


@reward("correct", low=0.0, high=1.0)
def correct(inputs: RewardInput) -> float:
    """1 when the grader finds the answer equal to the gold answer, else 0."""
    verdict = grade_completion(inputs.completion, inputs.gold, parsed=inputs.parsed, matcher=inputs.matcher)
    return float(verdict.correct)


@reward("numeric", low=0.0, high=1.0)
def numeric(inputs: RewardInput) -> float:
    """1 when the answer is a finite number, else 0 (S0.30)."""
    return float(inputs.parsed.answer is not None and numeric_value(inputs.parsed.answer) is not None)
