"""A forecast of GRPO before hours are spent: expected gain on held-out problems, its interval, hours, and what to do (``algorist forecast``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from algorist.training.extension import Extension, extension


@extension
class Forecast(Extension):
    """Adds the gain to expect to what preflight has sampled; ``algorist forecast`` tries steps as well."""

    name = "forecast"

    @classmethod
    def takes_part(cls, recipe: Any) -> bool:
        return bool(recipe.grpo.enabled and any(reward.weight for reward in recipe.rewards))

    def preview(self, look: Any) -> Mapping[str, Any] | None:
        if not hasattr(look, "groups") or look.sft:
            return None
        from algorist.extensions.forecast.preview import preview

        return preview(look.groups)
