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

from pydantic import Field

from algorist.config.section import Section
from algorist.training.extension import Extension, Sampled, SamplingTrainer, extension
from algorist.types import Group


class ResampleSection(Section):
    """Dynamic sampling (DAPO): groups without a signal are replaced by groups of fresh problems."""

    when_below: float = Field(0.5, gt=0, le=1)
    """Share of useful groups below which a rollout batch is filled up; 1: always, as DAPO does."""
    max_rounds: int = Field(4, ge=1)
    """Most rounds of fresh groups for a rollout batch."""
    max_share: float = Field(3.0, gt=0)
    """Most fresh groups for a rollout batch, as a multiple of its own."""


class _Keys(Section):
    resample: ResampleSection | None = None
    """Replace groups whose rewards are all equal by fresh ones."""


@extension
class Resample(Extension):
    name, keys, order = "resample", {"grpo": _Keys}, 20

    def groups(self, sampled: Sampled, sampler: SamplingTrainer) -> None:
        ids = {group.problem.id for group in sampled.groups}

        def draw(number: int) -> list[Group]:
            fresh = sampler.draw(number, ids)
            ids.update(problem.id for problem in fresh)
            return sampler.sample(fresh) if fresh else []

        least = math.ceil(sampler.processes / sampler.group_size)  # work for every process
        rounds = refill(sampled, draw, sampler.useful, self.recipe.grpo.resample, least=least)
        sampled.metrics["groups/refill_rounds"] = rounds


def refill(
    sampled: Sampled,
    draw: Callable[[int], list[Group]],
    useful: Callable[[Sequence[Group]], list[bool]],
    limits: ResampleSection,
    *,
    least: int = 1,
) -> int:
    """Replace useless groups by fresh ones until each place has a useful one, or a limit is reached; nothing where enough are useful.

    Args:
        sampled: P groups of a rollout batch, changed in place.
        draw: Samples so many groups of fresh problems; none when there are no more.
        useful: Which groups carry a signal.
        limits: The share of useful groups that is enough, rounds and groups at most.
        least: Fewest groups of a round.

    Returns:
        Rounds of fresh groups.
    """
    groups, rounds = sampled.groups, 0
    empty = [place for place, good in enumerate(useful(groups)) if not good]
    count, right = len(groups), len(groups) - len(empty)
    left = int(limits.max_share * len(groups)) if right < limits.when_below * len(groups) else 0
    while empty and left > 0 and rounds < limits.max_rounds:
        share = (right + 1) / (count + 2)  # never 0
        fresh = draw(max(least, min(left, math.ceil(len(empty) / share))))
        if not fresh:
            break
        rounds += 1
        sampled.seconds += fresh[0].seconds
        left -= len(fresh)
        count += len(fresh)
        for group, good in zip(fresh, useful(fresh), strict=True):
            right += good
            if good and empty:
                place = empty.pop(0)
                group, groups[place] = groups[place], group
            sampled.spare.append(group)
    return rounds
