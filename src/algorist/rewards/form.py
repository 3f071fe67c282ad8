"""Rewards for keeping to the format."""

from __future__ import annotations

from algorist.rewards.base import RewardInput, reward


@reward("well_formed", low=0.0, high=1.0)
def well_formed(inputs: RewardInput) -> float:
    """1 when the completion follows the prompt format exactly, else 0."""
    return float(inputs.parsed.well_formed)


@reward("tag_fraction", low=0.0, high=1.0)
def tag_fraction(inputs: RewardInput) -> float:
    """The share of the four tags of ``reasoning_answer`` that occur, whatever their order and case (S0.31)."""
    lowered = inputs.completion.lower()
    return sum(tag in lowered for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>")) / 4
