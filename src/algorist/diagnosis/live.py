"""The same diagnosis while a run trains: one line per cause, once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from algorist.diagnosis.diagnose import find_causes
from algorist.diagnosis.findings import Finding, Settings
from algorist.diagnosis.signals import Signals
from algorist.store.safe_text import one_line

log = logging.getLogger("algorist.diagnosis")

CHECKS_PER_RUN = 50
"""Every step up to here, then every N // 50 steps: the cost of looking stays far below that of a step."""


class LiveDiagnosis:
    """Watches a run: feed it with graded rollouts and metric lines, it says each cause at most once.

    What a checkpoint tells (unchanged weights) is left to ``diagnose``.

    Args:
        recipe: The resolved recipe (anything with ``model_dump()``) or its values as a mapping.
        say: Shows one line.
        run_folder: Named in the line as the place to ask for more.
    """

    def __init__(self, recipe: Any, say: Callable[[str], None], run_folder: str = "RUN") -> None:
        values: Mapping[str, Any] = recipe.model_dump() if hasattr(recipe, "model_dump") else recipe
        self.signals = Signals(settings=Settings(values))
        self.say, self.run_folder = say, run_folder
        self.said: list[str] = []

    def on_rollouts(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take the graded rollouts of one generation batch; never raises."""
        try:
            self.signals.add_rollouts(records)
        except Exception:
            log.exception("the diagnosis could not read a batch of rollouts")

    def on_metrics(self, step: int, values: Mapping[str, Any], stage: str = "grpo") -> list[Finding]:
        """Take one line of metrics, say what is new, and return it; never raises."""
        try:
            self.signals.add_metrics(stage, step, values)
            return self._look() if self._is_time(stage) else []
        except Exception:
            log.exception("the diagnosis failed at step %d; training goes on", step)
            return []

    def _is_time(self, stage: str) -> bool:
        count = len(self.signals.lines[stage])
        return count % max(1, count // CHECKS_PER_RUN) == 0

    def _look(self) -> list[Finding]:
        new = [f for f in find_causes(self.signals) if f.name not in self.said]
        for finding in new:
            self.said.append(finding.name)
            text = one_line(f"warning: {finding.one_line()} · more: algorist diagnose {self.run_folder}")
            self.say(text)
        return new
