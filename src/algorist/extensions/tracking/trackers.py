"""Experiment trackers: metrics, reward distributions and evaluations of a run, with the recipe as its configuration.

One tracker run per training run, whichever stages it has. Names are ``STAGE/NAME``: the lines of ``metrics.jsonl``, and each
evaluation as ``STAGE/eval/NAME`` at its step. The evaluation that closes a stage is also the run's outcome, ``final/NAME``. A
tracker that fails is dropped with one line; the same numbers always stand in the run folder.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import sys
import unicodedata
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from algorist.config.yaml_text import flat, to_yaml
from algorist.errors import DAMAGED, ConfigError, MissingExtraError
from algorist.extensions.tracking import TrackingSection
from algorist.store.redact import redact, redact_tree
from algorist.store.safe_text import first_line, printable
from algorist.store.stages import STAGES
from algorist.store.write import read_metrics

log = logging.getLogger("algorist.extensions.tracking.trackers")

DEFAULT_PROJECT = "algorist"
IDS = "trackers.json"
WANDB_WAIT_S = 20.0
WANDB_REFUSES, WANDB_LONGEST = r"[/\\#?%:]", 128
"""Characters that wandb refuses in a project's name, and its greatest length; its own check comes after the model is loaded."""


@dataclass(frozen=True)
class RunIdentity:
    """Identity of a run in its trackers."""

    project: str | None
    entity: str | None
    name: str
    tags: list[str]
    offline: bool
    config: dict[str, Any]
    folder: Path
    ids: dict[str, str]
    """Identity of this run in each tracker, so that a resumed run continues there."""
    say: Callable[[str], None]


class Tracker:
    """One tracker, open for one run."""

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send numbers of one step."""

    def histogram(self, stage: str, step: int, name: str, values: Sequence[float]) -> None:
        """Send a distribution; left out by trackers that show none."""

    def outcome(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send the closing numbers, in place of those of an earlier stage."""

    def finish(self) -> None:
        """Close the run there."""


class TensorBoardTracker(Tracker):
    """Event files in ``tensorboard/<stage>`` of the run folder, or below TENSORBOARD_LOGGING_DIR."""

    def __init__(self, run: RunIdentity) -> None:
        from torch.utils.tensorboard import SummaryWriter

        base = os.environ.get("TENSORBOARD_LOGGING_DIR")
        self._folder = Path(base).expanduser() / run.name if base else run.folder / "tensorboard"
        self._make, self._run = SummaryWriter, run
        self._writers: dict[str, Any] = {}

    def _writer(self, stage: str, step: int) -> Any:
        """Open the stage's file; a resumed run hides there what is logged again, from ``step`` on."""
        if stage not in self._writers:
            folder = self._folder / stage
            known = folder.is_dir()
            writer = self._make(log_dir=str(folder), purge_step=step if known else None)
            self._writers[stage] = writer
            if not known:
                about = {"name": self._run.name, "project": self._run.project, "tags": self._run.tags}
                writer.add_text("run", _as_code(about), step)
                writer.add_text("recipe", _as_code(self._run.config), step)
        return self._writers[stage]

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        late = all(name.startswith("eval/") for name in values)  # its step's own line stays
        writer = self._writer(stage, step + late)
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def histogram(self, stage: str, step: int, name: str, values: Sequence[float]) -> None:
        import numpy

        writer = self._writer(stage, step + 1)  # the line of step was there before
        writer.add_histogram(name, numpy.asarray(values, dtype=float), step)

    def outcome(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Write scalars ``final/NAME`` beside the stage's others: an event file has no summary."""
        self.log(stage, step, _final(values))

    def finish(self) -> None:
        for writer in self._writers.values():
            writer.close()


class WandbTracker(Tracker):
    """Weights & Biases. Where its server cannot be reached the run is recorded offline."""

    def __init__(self, run: RunIdentity) -> None:
        import wandb

        self._wandb = wandb
        settings: dict[str, Any] = {
            "project": run.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            "entity": run.entity,
            "name": run.name,
            "tags": run.tags,
            "config": run.config,
            "id": run.ids.setdefault("wandb", uuid.uuid4().hex[:12]),
            "resume": "allow",
            "dir": os.environ.get("WANDB_DIR") or str(run.folder.resolve()),
            "settings": wandb.Settings(
                quiet=True, **({} if "WANDB_INIT_TIMEOUT" in os.environ else {"init_timeout": WANDB_WAIT_S})
            ),
        }
        if run.offline:
            settings["mode"] = "offline"
        try:
            with _redacted_command():  # wandb sends it
                self._run = wandb.init(**settings)
        except Exception as error:
            if run.offline:
                raise
            run.say(
                f"wandb cannot be reached ({first_line(error)}); the run is recorded in {settings['dir']}/wandb; send it "
                "later: wandb sync FOLDER"
            )
            run.ids["wandb"] = uuid.uuid4().hex[:12]  # the failed attempt still holds the other one
            with _redacted_command():
                self._run = wandb.init(**settings | {"mode": "offline", "id": run.ids["wandb"]})
        for stage in STAGES:
            self._run.define_metric(f"{stage}/step", hidden=True)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"{stage}/{name}": value for name, value in values.items()} | {f"{stage}/step": step})

    def histogram(self, stage: str, step: int, name: str, values: Sequence[float]) -> None:
        self._run.log({f"{stage}/{name}": self._wandb.Histogram(list(values)), f"{stage}/step": step})

    def outcome(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Write ``final/NAME`` into the run's summary."""
        self._run.summary.update(_final(values))

    def finish(self) -> None:
        """Finish the run and wait until everything is sent."""
        self._run.finish(exit_code=int(failing()))


def failing() -> bool:
    """Return whether the run ends by an exception: trackers are finished while it is handled."""
    return sys.exc_info()[0] is not None


class TrackioTracker(Tracker):
    """trackio: a database on this machine, or the Space in TRACKIO_SPACE_ID."""

    def __init__(self, run: RunIdentity) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(
            project=run.project or os.environ.get("TRACKIO_PROJECT") or DEFAULT_PROJECT,
            name=run.name,
            config=run.config | {"tags": run.tags},
            resume="allow" if "trackio" in run.ids else "never",  # others may have its name
            space_id=None if run.offline else os.environ.get("TRACKIO_SPACE_ID"),
        )
        run.ids["trackio"] = run.name

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log({f"{stage}/{name}": v for name, v in values.items()} | {f"{stage}/step": step})

    def outcome(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send ``final/NAME`` as one more line: trackio has no summary."""
        self._trackio.log(_final(values))

    def finish(self) -> None:
        self._trackio.finish()


class MlflowTracker(Tracker):
    """MLflow, where MLFLOW_TRACKING_URI says."""

    def __init__(self, run: RunIdentity) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT)
        tags = {"mlflow.runName": run.name, **dict.fromkeys(run.tags, "true")}
        if "mlflow" in run.ids:
            mlflow.start_run(run_id=run.ids["mlflow"])
        else:
            run.ids["mlflow"] = mlflow.start_run(run_name=run.name).info.run_id
            parameters = [(key, str(value)[:500]) for key, value in flat(run.config).items()]
            for start in range(0, len(parameters), 100):  # the API's limit
                mlflow.log_params(dict(parameters[start : start + 100]))
            mlflow.log_dict(run.config, "recipe.yaml")
        mlflow.set_tags(tags)

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send numbers; MLflow takes no parentheses in names."""
        self._mlflow.log_metrics({f"{stage}/{_mlflow_name(k)}": v for k, v in values.items()}, step=step)

    def outcome(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send ``final/NAME``; the last value of a metric is what MLflow shows of a run."""
        self._mlflow.log_metrics({_mlflow_name(name): value for name, value in _final(values).items()})

    def finish(self) -> None:
        self._mlflow.end_run("FAILED" if failing() else "FINISHED")


TRACKERS: dict[str, Callable[[RunIdentity], Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}


class Trackers:
    """All trackers of a run. Nothing that goes wrong in one of them reaches the training."""

    def __init__(self, say: Callable[[str], None], last_step: dict[str, int] | None = None) -> None:
        self._say, self._last_step = say, last_step or {}
        self._open: dict[str, Tracker] = {}

    def open(self, name: str, run: RunIdentity) -> None:
        try:
            self._open[name] = TRACKERS[name](run)
        except Exception as error:
            self._drop(name, "cannot be opened", error)

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self._last_step[stage] = step
        self._each(lambda tracker: tracker.log(stage, step, values))

    def rewards(self, stage: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send the distribution of the rollouts' rewards to all."""
        values = [float(row["reward"]) for row in rows if row["reward"] is not None]
        if values and self._open:
            step = int(rows[0]["step"])
            self._each(lambda tracker: tracker.histogram(stage, step, "reward_distribution", values))

    def evaluation(self, stage: str, step: int | None, values: Mapping[str, float]) -> None:
        """Send an evaluation to all: at ``step``, or at the stage's last one, where a trained model's is the outcome too."""
        at = self._last_step.get(stage, 0) if step is None else step
        known = {name: value for name, value in values.items() if isfinite(value)}
        self.log(stage, at, {f"eval/{name}": value for name, value in known.items()})
        if step is None and stage != "base":
            self._each(lambda tracker: tracker.outcome(stage, at, known))

    def finish(self) -> None:
        self._each(lambda tracker: tracker.finish())
        self._open.clear()

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                action(tracker)
            except Exception as error:
                self._drop(name, "failed", error)

    def _drop(self, name: str, what: str, error: Exception) -> None:
        """Warn once that a tracker is gone."""
        self._open.pop(name, None)
        line = first_line(error)
        log.info("tracker %s %s: %s", name, what, line)
        self._say(
            f"tracker {name} {what} ({line}); the run continues without it, all numbers are in metrics.jsonl"
        )


def check_trackers(names: Sequence[str], section: TrackingSection | None = None) -> None:
    """Refuse trackers that are not installed or have a project they will not take, before anything is loaded.

    Raises:
        MissingExtraError: The message says what to install.
        ConfigError: wandb refuses the project's name, from ``tracking.project`` or WANDB_PROJECT.
    """
    if "wandb" in names:
        project = section.project if section else None
        _check_wandb_project(project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT, bool(project))
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name where the run starts has none
            extra = "wandb" if name == "wandb" else "tracking"
            install = "mlflow" if name == "mlflow" else f"'algorist[{extra}]'"
            raise MissingExtraError(
                f"report_to names {name}, which is not installed: pip install {install}; or leave it out: "
                f"report_to={json.dumps([n for n in names if n != name])}"
            )


def _check_wandb_project(project: str, from_recipe: bool) -> None:
    plain = "".join(
        "-" if unicodedata.category(c) in ("So", "Cc", "Cf", "Cs", "Co", "Cn") else c for c in project
    )
    fits = re.sub(WANDB_REFUSES, "-", plain)[:WANDB_LONGEST]
    if project != fits:
        raise ConfigError(
            f"{'tracking.project' if from_recipe else 'WANDB_PROJECT'} is '{printable(project)}'; wandb takes up to "
            f"{WANDB_LONGEST} characters and none of / \\ # ? % : nor an emoji in a project's name. Take {fits}"
        )


def open_trackers(recipe: Any, folder: Path, say: Callable[[str], None]) -> Trackers:
    """Return the recipe's trackers, open."""
    lines = read_metrics(folder / "metrics.jsonl")
    trackers = Trackers(say, {str(line.get("stage")): int(line.get("step") or 0) for line in lines})
    run = identity(recipe, folder, say)
    for name in recipe.report_to:
        trackers.open(name, run)
    _write_ids(folder, run.ids)
    return trackers


def identity(recipe: Any, folder: Path, say: Callable[[str], None] = print) -> RunIdentity:
    """Return a run's identity for trackers; secrets are left out of the recipe."""
    section = recipe.tracking
    return RunIdentity(
        project=section.project and redact(section.project),
        entity=section.entity and redact(section.entity),
        name=redact(section.run_name or folder.name),
        tags=[redact(tag) for tag in section.tags],
        offline=section.offline,
        config=redact_tree(yaml.safe_load(to_yaml(recipe))),
        folder=folder,
        ids=_read_ids(folder),
        say=say,
    )


@contextmanager
def _redacted_command() -> Iterator[None]:
    command = sys.argv
    sys.argv = [redact(word) for word in command]
    try:
        yield
    finally:
        sys.argv = command


def _read_ids(folder: Path) -> dict[str, str]:
    try:
        ids = json.loads((folder / IDS).read_text(encoding="utf-8"))
        return {str(key): str(value) for key, value in ids.items()}
    except DAMAGED:
        return {}


def _write_ids(folder: Path, ids: Mapping[str, str]) -> None:
    if ids and ids != _read_ids(folder):
        (folder / IDS).write_text(json.dumps(ids) + "\n", encoding="utf-8")


def _final(values: Mapping[str, float]) -> dict[str, float]:
    return {f"final/{name}": value for name, value in values.items()}


def _mlflow_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)


def _as_code(value: Any) -> str:
    """Return a value as YAML in a Markdown block."""
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return "\n".join(f"    {line}" for line in text.splitlines())
