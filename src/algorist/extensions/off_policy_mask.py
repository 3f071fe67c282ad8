"""Completions of negative advantage that the policy has already moved away from are left out of the loss.

Source: DeepSeek-V3.2 (2512.02556) eq. 9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from algorist.config.section import Section
from algorist.training.extension import Extension, extension

if TYPE_CHECKING:
    from torch import Tensor

    from algorist.training.batch import Batch
    from algorist.training.metrics import Metrics


class _Keys(Section):
    off_policy_mask: float | None = Field(None, gt=0)
    """Leave out completions of negative advantage whose tokens became less likely by more than so many nats on average since they were
    sampled (try 0.5). Matters with several updates per rollout batch, ``replay``, or an inexact engine."""


@extension
class OffPolicyMask(Extension):
    name, keys = "off_policy_mask", {"grpo": _Keys}

    def factor(self, log_probs: Tensor, batch: Batch, metrics: Metrics) -> Tensor | None:
        """Return 0 for the completions that are left out; what sampled is compared, where its log-probs are known."""
        from algorist.objectives import on_policy_sequences

        sampler = batch.sampler_log_probs if batch.sampler_log_probs is not None else batch.old_log_probs
        if sampler is None:
            return None
        if batch.old_log_probs is not None:  # a replayed group has its sampler's log-probs there
            sampler = sampler.where(~sampler.isnan(), batch.old_log_probs)
        threshold = self.recipe.grpo.off_policy_mask
        learned = on_policy_sequences(log_probs, sampler, batch.advantages, batch.mask, threshold)
        metrics.add("off_policy_mask/masked", (~learned).float(), batch.mask)
        return learned.float()
