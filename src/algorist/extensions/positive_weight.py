"""Completions that did better than expected weigh less than those that did worse, so that the policy keeps its variety.

Source: the surprising effectiveness of negative reinforcement (2506.01347) section 5: W-REINFORCE is ``grpo.advantage=reinforce`` with
weight 0.1; 0 is NSR, learning from wrong completions alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from algorist.config.section import Section
from algorist.training.extension import Extension, Policy, extension

if TYPE_CHECKING:
    from algorist.training.batch import Batch


class _Keys(Section):
    positive_weight: float = Field(1.0, ge=0)
    """Factor of advantages above 0; 0.1 with ``advantage: reinforce`` is W-REINFORCE."""


@extension
class PositiveWeight(Extension):
    name, keys, order = "positive_weight", {"grpo": _Keys}, 20

    def batch(self, batch: Batch, policy: Policy) -> Batch:
        weight = self.recipe.grpo.positive_weight
        advantages = batch.advantages
        return replace(batch, advantages=advantages.where(advantages <= 0, advantages * weight))
