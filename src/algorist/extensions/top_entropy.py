"""The loss counts the tokens of highest entropy only: those where the policy decides. Source: Beyond the 80/20 rule (2506.01939)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from algorist.config.section import Section
from algorist.training.extension import Extension, Policy, extension

if TYPE_CHECKING:
    from algorist.training.batch import Batch


class _Keys(Section):
    top_entropy_share: float = Field(1.0, gt=0, le=1)
    """Share of a step's tokens that the loss counts: those where the policy was least certain, found by one more forward pass; 1 counts
    all."""


@extension
class TopEntropy(Extension):
    name, keys = "top_entropy", {"grpo": _Keys}

    def update(self, batch: Batch, policy: Policy) -> Batch:
        """Count the tokens of highest entropy among the step's of all processes."""
        from algorist.objectives import top_entropy_mask

        share = self.recipe.grpo.top_entropy_share
        entropy = policy.log_probs_of(batch, entropy=True)
        mask = top_entropy_mask(entropy, batch.mask, policy.everyone(entropy[batch.mask]), share)
        return replace(batch, counted=mask.float() if batch.counted is None else batch.counted * mask)
