"""Right completions that a reward of the user's own pays no more than wrong ones, and what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from algorist.diagnosis.evaluations import run_of
from algorist.diagnosis.rule import Facts, fact
from algorist.diagnosis.signals import MIN_GROUPS
from algorist.store.read import query

UNPAID = 0.5
"""Share of the right completions without pay that is no exception."""


@fact("{}")
def right_unpaid(f: Facts) -> str | None:
    """Count the right completions that a reward of the user's own pays as it pays wrong ones; None where they are few."""
    for name in _own_rewards(f):
        rows = query(
            run_of(f),
            "SELECT rewards[?] AS paid, length(completion) AS size, correct FROM rollouts "
            "WHERE stage = 'grpo' AND rewards[?] IS NOT NULL",
            [name, name],
        )
        right, wrong = ([row for row in rows if bool(row["correct"]) is side] for side in (True, False))
        if min(len(right), len(wrong)) < MIN_GROUPS:
            continue
        usual = median(row["paid"] for row in wrong)
        unpaid = [row["size"] for row in right if row["paid"] <= usual]
        if len(unpaid) >= UNPAID * len(right):
            paid = [row["size"] for row in right if row["paid"] > usual]
            return f"{name} pays {len(unpaid)} of {len(right)} right completions no more than wrong ones{_divided(paid, unpaid)}"
    return None


def _own_rewards(f: Facts) -> list[str]:
    """Return the names of rewards that are functions of files, as rollouts name them; none beside one that pays right answers."""
    rewards = [row for row in f.settings.rewards() if float(row.get("weight", 1.0)) > 0]
    if any(row["name"] == f.get("grading_reward") for row in rewards):
        return []  # a user's own beside it may pay the format
    return [str(row["name"]).rpartition(":")[2] for row in rewards if ".py:" in str(row["name"])]


def _divided(paid: Sequence[int], unpaid: Sequence[int]) -> str:
    """Name the length that divides the two; nothing where none does."""
    if not paid:
        return ""
    if max(paid) < min(unpaid):
        return f": those of more than {max(paid)} characters"
    return f": those of fewer than {min(paid)} characters" if max(unpaid) < min(paid) else ""
