"""An entropy bonus that grows while the policy is more certain than it should be, and is off while it is not.

With c the coefficient, Δ its step and e_k the mean entropy of the tokens of step k, as Skywork-OR1 (2505.22312, adaptive entropy
control) and TRL's ``use_adaptive_entropy``:

    c ← c + Δ where e_k ≤ target, else c - Δ, within [0, most];    the bonus of step k + 1 is c where e_k ≤ target, else 0

The first step, before any entropy is known, has no bonus.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from algorist.config.section import Section
from algorist.training.extension import Extension, extension


class EntropySection(Section):
    """A target for the mean entropy of the next-token distributions, and how fast the bonus follows it."""

    target: float = Field(0.2, gt=0)
    """Entropy in nats per token that the policy should not fall below; take it from the ``entropy`` of the first steps."""
    step: float = Field(0.005, gt=0)
    """Change of the coefficient after each optimizer step."""
    start: float = Field(0.0, ge=0)
    """Coefficient before the first step."""
    most: float = Field(1.0, gt=0)
    """Greatest coefficient."""


class _Keys(Section):
    entropy_control: EntropySection | None = None
    """Raise the weight of the entropy while the policy's entropy is below a target."""


@extension
class EntropyControl(Extension):
    name, keys, needs_every_row = "entropy_control", {"grpo": _Keys}, True

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self.section = recipe.grpo.entropy_control
        self.coefficient = self.section.start

    def updated(self, values: Mapping[str, float]) -> Mapping[str, float]:
        """Move the coefficient towards the target; a step whose entropy is not known changes nothing."""
        entropy = values.get("entropy", math.nan)
        used = self.entropy_bonus
        if not math.isnan(entropy):
            low = entropy <= self.section.target
            moved = self.coefficient + (self.section.step if low else -self.section.step)
            self.coefficient = min(max(moved, 0.0), self.section.most)
            self.entropy_bonus = self.coefficient if low else 0.0
        return {"entropy_control/bonus": used, "entropy_control/coefficient": self.coefficient}

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient, "bonus": self.entropy_bonus}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coefficient, self.entropy_bonus = state["coefficient"], state["bonus"]
