"""The routes that a recipe could take from its model to a trained one, each as keys of the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from algorist.config.schema import Recipe

SFT, GRPO, TEACHER = "sft", "grpo", "teacher"
EVEN = 0.5
"""Share of the time that SFT gets where the recipe does not say."""


@dataclass(frozen=True)
class TrainingRoute:
    """A way to train.

    Attributes:
        name: In words.
        change: Keys of the recipe, ``key=value`` each.
        stages: In the order in which they are done.
        learner: What the last stage learns from: ``sft``, ``grpo`` or ``teacher``.
    """

    name: str
    change: tuple[str, ...]
    stages: tuple[str, ...]
    learner: str

    def steps(self, seconds: float, per_step: Mapping[str, float], share: float) -> dict[str, int]:
        """Return the steps of each stage that take so many seconds in all; ``share`` of them is SFT's where both are done."""
        shares = {SFT: share, GRPO: 1 - share} if len(self.stages) > 1 else {self.stages[0]: 1.0}
        return {stage: max(1, round(seconds * part / per_step[stage])) for stage, part in shares.items()}


def routes_of(recipe: Recipe) -> list[TrainingRoute]:
    """Return the routes, the recipe's own kind first.

    SFT is possible where the recipe has it on or names its demonstrations. With a teacher the same are tried without it, with tools the
    whole route without them.
    """
    teacher, tools = getattr(recipe.grpo, "teacher", None), getattr(recipe, "tools", None)
    shows = recipe.sft.enabled or recipe.data.sft is not None
    paid = any(reward.weight > 0 for reward in recipe.rewards)
    rewards = () if paid else ("rewards=[correct]",)
    alone, both = ("sft.enabled=false", "grpo.enabled=true"), ("sft.enabled=true", "grpo.enabled=true")
    learners = [("GRPO", ("grpo.teacher=null", *rewards) if teacher else rewards, GRPO)]
    if teacher:
        learners.insert(0, ("the teacher", (), TEACHER))
    routes = []
    for name, change, learner in learners:
        routes += (
            [TrainingRoute(f"SFT, then {name}", (*both, *change), (SFT, GRPO), learner)] if shows else []
        )
        routes += [TrainingRoute(f"{name} alone", (*alone, *change), (GRPO,), learner)]
    if shows:
        routes.insert(1, TrainingRoute("SFT alone", ("sft.enabled=true", "grpo.enabled=false"), (SFT,), SFT))
    if tools:
        first = routes[0]
        changed = (*first.change, "tools=null")
        routes.append(TrainingRoute(f"{first.name}, without tools", changed, first.stages, first.learner))
    return routes
