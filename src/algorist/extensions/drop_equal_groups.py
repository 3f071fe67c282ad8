"""Groups that teach nothing do not count in the mean over a step either: the step is as long as if they had not been sampled.

Source: ScaleRL (2510.13786) section 3, zero-variance filtering; unlike ``resample``, nothing is sampled in their places.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from algorist.config.section import Section
from algorist.training.extension import Extension, Policy, extension

if TYPE_CHECKING:
    from algorist.training.batch import Batch


class _Keys(Section):
    drop_equal_groups: bool = False
    """Leave groups whose advantages are all 0 out of the mean over the step, which they only make smaller."""


@extension
class DropEqualGroups(Extension):
    name, keys, order = "drop_equal_groups", {"grpo": _Keys}, 30

    def check(self, plan: Any) -> Iterable[str]:
        if plan.objective is not None and plan.objective.loss.reduction == "micro-batch-token-mean":
            yield (
                "grpo.drop_equal_groups with a mean over micro-batches: which of them a group is in decides what it is divided by; take "
                "grpo.reduction=token-mean"
            )

    def batch(self, batch: Batch, policy: Policy) -> Batch:
        """Weigh the others up by what is left out, counted over all processes and steps of the rollout batch."""
        lengths = policy.everyone(batch.mask.sum(1).float())
        teaches = policy.everyone(((batch.advantages != 0) & batch.mask).any(1).float()) > 0
        groups = teaches.view(-1, self.recipe.grpo.group_size).any(1)
        teaches = groups.repeat_interleave(self.recipe.grpo.group_size)
        if not teaches.any():
            return batch
        by_token = policy.objective.loss.reduction == "token-mean"
        scale = lengths.sum() / lengths[teaches].sum() if by_token else len(teaches) / teaches.sum()
        first = policy.rank * len(batch)
        factors = (teaches[first : first + len(batch)] * scale)[:, None].expand(batch.mask.shape)
        return replace(
            batch, counted=factors.contiguous() if batch.counted is None else batch.counted * factors
        )
