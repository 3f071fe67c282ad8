"""Warnings while a run trains: the diagnosis of what it has shown so far, each cause once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from algorist.training.extension import Control, Event, Extension, extension

if TYPE_CHECKING:
    from algorist.diagnosis.diagnose import LiveDiagnosis


@extension
class LiveWarnings(Extension):
    name = "live"
    watch: LiveDiagnosis | None = None

    def open(self, run: Any) -> None:
        from algorist.diagnosis.diagnose import LiveDiagnosis

        if run.processes.main:
            self.watch = LiveDiagnosis(self.recipe, run.display.say, str(run.folder.path))

    def seen(self, event: Event) -> Control | None:
        if self.watch is not None and event.kind == "rollouts":
            self.watch.on_rollouts(event.rows)
        if self.watch is not None and event.kind == "metrics":
            self.watch.on_metrics(event.step or 0, event.values, event.stage)
        return None
