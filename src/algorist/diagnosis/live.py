"""The same diagnosis while a run trains: one line per cause, once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from algorist.config.schema import Recipe
from algorist.diagnosis.diagnose import find_causes
from algorist.diagnosis.findings import Settings
from algorist.diagnosis.signals import Signals
from algorist.store.safe_text import one_line

log = logging.getLogger("algorist.diagnosis")

CHECKS_PER_RUN = 50
"""Every step up to here, then every N // 50 steps: the cost of looking stays far below that of a step."""


class LiveDiagnosis:
    """Watches a run: feed it with graded rollouts and metric lines, it says each cause at most once.

    What a checkpoint tells (unchanged weights) is left to ``diagnose``.

    Args:
        recipe: The resolved recipe.
        say: Shows one line.
        run_folder: Named in the line as the place to ask for more.
    """

    def __init__(self, recipe: Recipe, say: Callable[[str], None], run_folder: str) -> None:
        self.signals = Signals(settings=Settings(recipe.model_dump()))
        self.say, self.run_folder = say, run_folder
        self.said: set[str] = set()

    def on_rollouts(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take the graded rollouts of one generation batch; never raises."""
        try:
            self.signals.add_rollouts(records)
        except Exception:
            log.exception("the diagnosis could not read a batch of rollouts")

    def on_metrics(self, step: int, values: Mapping[str, Any], stage: str) -> None:
        """Take one line of metrics and say what is new; never raises."""
        try:
            self.signals.add_metrics(stage, step, values)
            count = len(self.signals.lines[stage])
            if count % max(1, count // CHECKS_PER_RUN) == 0:
                self._look()
        except Exception:
            log.exception("the diagnosis failed at step %d; training continues", step)

    def _look(self) -> None:
        for finding in find_causes(self.signals):
            if finding.name not in self.said:
                self.said.add(finding.name)
                self.say(
                    one_line(f"warning: {finding.one_line()} · more: algorist diagnose {self.run_folder}")
                )
