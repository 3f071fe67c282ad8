"""Benchmarks of few problems: a warning, and the samples that make them worth comparing on."""

from __future__ import annotations

FEW = 100
"""Problems below which one greedy run says little about a difference between two models."""


def samples_for(problems: int) -> int:
    """Return the sampled completions per problem (avg@n) that make a benchmark of this size worth comparing on.

    About 1,000 completions, a power of two up to 64: 32 for AIME's 30 problems, none from 500 on.
    """
    samples = 1
    while samples < 64 and samples * problems < 900:
        samples *= 2
    return samples if problems < 500 and samples > 1 else 0


def too_few(problems: int, samples: int, reference: str = "") -> str:
    """Return a warning where ``problems`` and ``samples`` cannot tell two models apart, else an empty string.

    Args:
        reference: The reference protocol of the evaluation, whose samples are fixed.
    """
    enough = samples_for(problems)
    if problems == 0 or problems >= FEW or samples >= enough:
        return ""
    more = f"average {enough} samples: --protocol sampled-{enough}@0.6/0.95 (pass@1 is then avg@{enough})"
    if reference:
        more = f"--protocol {reference} fixes its samples, so only more problems tell more"
    return (
        f"{problems} problems: one of them is {100 / problems:.1f} points, and two runs of the same model may differ by "
        f"{round(196 * (0.5 / problems) ** 0.5)} points; {more}"
    )
