"""Experiment trackers (``report_to``): metrics, reward distributions and evaluations of a run, and the recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from algorist.config.section import Section
from algorist.training.extension import Control, Event, Extension, extension

if TYPE_CHECKING:
    from algorist.extensions.tracking.trackers import Trackers


class TrackingSection(Section):
    """Settings of trackers (``report_to``)."""

    project: str | None = None
    """Project (wandb, trackio) or experiment (mlflow); the tracker's own variable (WANDB_PROJECT, …) or ``algorist``
    when left out."""
    entity: str | None = None
    """User or team in wandb; the account's default when left out."""
    run_name: str | None = None
    """Name of the run in trackers; the run folder's name when left out."""
    tags: list[str] = Field(default_factory=list)
    """Labels of the run in trackers."""
    offline: bool = False
    """Record wandb on this machine only, to be sent later with ``wandb sync``; the other trackers write locally
    unless their own variables name a server."""


def _one_tracker(value: Any) -> Any:
    """Take ``report_to: wandb`` for a list of one, and ``none`` for none."""
    if isinstance(value, str):
        return [] if value == "none" else [value]
    return value


class _Keys(Section):
    report_to: Annotated[
        list[Literal["wandb", "tensorboard", "trackio", "mlflow"]], BeforeValidator(_one_tracker)
    ] = Field(default_factory=list)
    """Trackers that get metrics, evaluations and the recipe."""
    tracking: TrackingSection = Field(default_factory=TrackingSection)
    """Name and labels of the run in trackers."""


@extension
class Tracking(Extension):
    name, keys = "tracking", {"": _Keys}
    trackers: Trackers | None = None

    @classmethod
    def takes_part(cls, recipe: Any) -> bool:
        return bool(recipe.report_to)

    def check(self, plan: Any) -> tuple[str, ...]:
        from algorist.extensions.tracking.trackers import check_trackers

        check_trackers(self.recipe.report_to, self.recipe.tracking)
        return ()

    def open(self, run: Any) -> Callable[[], None] | None:
        from algorist.extensions.tracking.trackers import open_trackers

        if not run.processes.main:
            return None
        self.trackers = open_trackers(self.recipe, run.folder.path, run.display.say)
        return self.trackers.finish

    def seen(self, event: Event) -> Control | None:
        if self.trackers is None:
            return None
        if event.kind == "metrics":
            self.trackers.log(event.stage, event.step or 0, event.values)
        elif event.kind == "rollouts":
            self.trackers.rewards(event.stage, event.rows)
        elif event.kind == "evaluation":
            self.trackers.evaluation(event.stage, event.step, event.values)
        return None
