"""Tools that the policy calls while it writes: a calculator, Python in a sandbox, a user's own; and environments that answer.

The replies travel with the model, in its prompt format (``source.py``), so that training, evaluation, ``solve`` and ``chat`` are answered
alike; here is what a training run adds: metrics, the end of a run whose tool fails always, completions that lead nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from algorist.extensions.tools.preview import preview
from algorist.extensions.tools.rules import RULES
from algorist.extensions.tools.section import ToolKeys
from algorist.extensions.tools.source import Tools
from algorist.extensions.tools.watch import FailingBatches, PaidWithoutVoid, turn_metrics
from algorist.training.extension import Control, Event, Extension, PolicyTrainer, extension


@extension
class ToolUse(Extension):
    name, keys, order = "tools", {"": ToolKeys}, 90
    rules = RULES

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self.source = Tools(recipe.tools, recipe.environment)
        self.failing = FailingBatches()

    def check(self, plan: Any) -> Iterable[str]:
        problems, rewards = plan.problems, [reward.name for reward in plan.recipe.rewards]
        self.source.check([*problems.train, *problems.held_out], rewards)
        return ()

    def preview(self, look: Any) -> Mapping[str, Any] | None:
        return preview(self.recipe, self.source, look) if hasattr(look, "groups") else None

    def prepare(self, model: Any, trainer: PolicyTrainer) -> None:
        if self.recipe.tools is not None and self.recipe.tools.drop_void:
            trainer.rewards = PaidWithoutVoid(trainer.rewards)

    def seen(self, event: Event) -> Control | None:
        if event.kind != "sampled":
            return None
        if self.recipe.tools is not None:
            self.failing.see(event.groups, self.recipe.tools.fail_steps)
        return Control(metrics=turn_metrics(event.groups))

    def state_dict(self) -> dict[str, Any]:
        return {"failing": self.failing.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.failing.counts = state["failing"]
