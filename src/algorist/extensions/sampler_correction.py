"""The correction for a sampler that differs from the trainer: truncated importance weights per token or sequence.

Why ``sequence_mask`` is the default, as it is TRL's. The policy gradient of a completion asks for the ratio of the whole sequence. A
ratio per token leaves out what came before the token: its gradient is biased by how far the two policies differ over the prefix, which
grows with the length. The ratio of a sequence is right in expectation and large now and then; truncating it keeps the outlier with a
wrong weight, masking leaves it out, and ``sampling/masked_share`` says how many were. Where both programs compute in the same type and
differ by rounding alone, ratios are near 1 and all four modes agree. ``token_truncate`` (the first one proposed, by F. Yao and others)
uses every token and varies least: take it when the masked share is a tenth or more and cannot be brought down.

Source: F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025) for tokens; J. Liu et al., "When
speed kills stability" (2025) for sequences and masks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from algorist.config.section import Section
from algorist.rollouts.engines import ENGINES, is_exact
from algorist.training.extension import Extension, Policy, extension

if TYPE_CHECKING:
    from algorist.training.batch import Batch


class CorrectionSection(Section):
    """Weigh the loss by how far the sampler's log-probs are from the trainer's, where the engine is not exact."""

    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "sequence_mask"
    """Correct per token or per sequence; ratios out of bounds are truncated, or their tokens masked."""
    low: float | None = Field(None, ge=0)
    """Lower bound of the ratio; none when left out."""
    high: float | None = Field(3.0, gt=0)
    """Upper bound of the ratio."""


class _Keys(Section):
    sampler_correction: CorrectionSection | None = Field(default_factory=CorrectionSection)
    """Correct the loss for an engine whose log-probs differ from the trainer's; null does not."""


@extension
class SamplerCorrection(Extension):
    name, keys, order = "sampler_correction", {"grpo": _Keys}, 40

    @classmethod
    def takes_part(cls, recipe: Any) -> bool:
        return recipe.grpo.enabled and recipe.grpo.sampler_correction is not None

    def check(self, plan: Any) -> Iterable[str]:
        section = self.recipe.grpo
        if not ENGINES.get(section.engine).exact and section.loss.name == "vespo":
            yield (
                "grpo.loss=vespo is not corrected for a sampler that differs from the trainer; take grpo.sampler_correction=null"
            )

    def prepare(self, model: Any, trainer: Policy) -> None:
        self.needs_old_log_probs = not is_exact(trainer.engine)

    def batch(self, batch: Batch, policy: Policy) -> Batch:
        from algorist.objectives import sampler_weights
        from algorist.training.metrics import Metrics

        old, sampler = batch.old_log_probs, batch.sampler_log_probs
        section = self.recipe.grpo.sampler_correction
        if not self.needs_old_log_probs or old is None or sampler is None:
            return batch
        weights = sampler_weights(old, sampler, batch.mask, section.mode, low=section.low, high=section.high)
        metrics = Metrics()
        for kind in ("mean", "min", "max"):
            metrics.add(f"sampling/importance_sampling_ratio/{kind}", weights, batch.mask)
        for kind in ("mean", "max"):
            metrics.add(f"sampling/sampling_logp_difference/{kind}", (old - sampler).abs(), batch.mask)
        metrics.add("sampling/masked_share", weights.expand_as(batch.mask) == 0, batch.mask)
        policy.note(metrics)
        return replace(batch, policy_weights=weights.expand_as(batch.mask).contiguous())
