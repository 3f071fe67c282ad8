"""Dynamic sampling: groups whose rewards are all equal teach nothing and are replaced by groups of fresh problems.

A place of the batch is filled by the next useful group in the order of drawing, however many are drawn at once, so each filled place
is a draw from the useful groups of the policy: the step's expectation is E[gradient of a group | it is useful], where a batch without
refill has P(useful) times that. Batches with enough useful groups stay as they are, and at the limit the places that are left keep their
useless groups, which add 0 to the gradient and count in the weights as they do without refill: that shortens a step and turns none.

Source: DAPO (2503.14476) section 3.2 and eq. 11.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from algorist.config.grpo_sections import ResampleSection
from algorist.types import Group


@dataclass
class Filled:
    """A rollout batch after its refill.

    Attributes:
        groups: The P groups that train.
        spare: Groups that were sampled and do not train, in the order of drawing.
        rounds: Rounds of fresh groups.
        seconds: Wall time of all sampling.
    """

    groups: list[Group]
    spare: list[Group] = field(default_factory=list)
    rounds: int = 0
    seconds: float = 0.0

    def metrics(self, useful: Sequence[bool], replayed: int) -> dict[str, float]:
        """Return the metrics of the refill; ``useful`` says which of ``groups`` carry a signal, ``replayed`` how many are earlier ones."""
        return {
            "groups/sampled": len(self.groups) + len(self.spare) - replayed,
            "groups/replayed": replayed,
            "groups/trained_useful_share": sum(useful) / len(self.groups),
            "groups/refill_rounds": self.rounds,
        }


def refill(
    groups: Sequence[Group],
    draw: Callable[[int], list[Group]],
    useful: Callable[[Sequence[Group]], list[bool]],
    limits: ResampleSection,
    *,
    least: int = 1,
) -> Filled:
    """Replace useless groups by fresh ones until each place has a useful one, or a limit is reached; nothing where enough are useful.

    Args:
        groups: P groups of a rollout batch.
        draw: Samples so many groups of fresh problems; none when there are no more.
        useful: Which groups carry a signal.
        limits: The share of useful groups that is enough, rounds and groups at most.
        least: Fewest groups of a round.
    """
    filled = Filled(list(groups), seconds=groups[0].seconds)
    empty = [place for place, good in enumerate(useful(groups)) if not good]
    sampled, right = len(groups), len(groups) - len(empty)
    left = int(limits.max_share * len(groups)) if right < limits.when_below * len(groups) else 0
    while empty and left > 0 and filled.rounds < limits.max_rounds:
        share = (right + 1) / (sampled + 2)  # never 0
        fresh = draw(max(least, min(left, math.ceil(len(empty) / share))))
        if not fresh:
            break
        filled.rounds += 1
        filled.seconds += fresh[0].seconds
        left -= len(fresh)
        sampled += len(fresh)
        for group, good in zip(fresh, useful(fresh), strict=True):
            right += good
            if good and empty:
                place = empty.pop(0)
                group, filled.groups[place] = filled.groups[place], group
            filled.spare.append(group)
    return filled
