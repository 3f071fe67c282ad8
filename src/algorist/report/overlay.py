"""Several runs in one page: the curves of all in each chart, their final figures, and each run's paired difference to the first."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from algorist.config.resume import flat
from algorist.config.yaml_text import one_line_yaml
from algorist.diagnosis.signals import read_settings
from algorist.errors import CheckpointError, DataError
from algorist.evaluation.artifact import Artifact, artifact_names, read_artifact
from algorist.report.build import render
from algorist.report.collect import compared, facts
from algorist.report.curves import curve_of, every_chart, metric_series, short_label
from algorist.store.atomic import replace_text
from algorist.store.read import metrics
from algorist.store.run_folder import RunFolder
from algorist.store.stages import EVALUATED

SHOWN = ("greedy_accuracy", "lenient_accuracy", "pass@1", "format", "truncated", "mean_tokens")
MOST = 8
"""Runs in one page: so many colours can be told apart."""


def overlay_path(runs: Sequence[Path]) -> Path:
    """Return where the page of these runs is by default: beside the first of them, named for all."""
    return runs[0].resolve().parent / f"report-{'-'.join(run.resolve().name for run in runs)[:120]}.html"


def build_overlay(runs: Sequence[Path], to: Path | None = None) -> Path:
    """Write one page about several runs and return its path.

    Args:
        runs: Two or more run folders, eight at most; their order is that of the colours.
        to: The file; ``overlay_path`` when left out.

    Raises:
        CheckpointError: No run there, a damaged one, or the file cannot be written.
        DataError: One run named twice, or too many.
    """
    folders = [RunFolder.open(Path(run)) for run in runs]
    places = [folder.path.resolve() for folder in folders]
    if len(set(places)) < len(places) or len(places) > MOST:
        raise DataError(
            f"report got {len(places)} runs, {len(set(places))} of them different; expected 2 to {MOST} different run folders"
        )
    names = [
        p.name if [q.name for q in places].count(p.name) == 1 else f"{p.parent.name}/{p.name}" for p in places
    ]
    lines = [metrics(folder.path) for folder in folders]
    stages = dict.fromkeys(str(row["stage"]) for of_run in lines for row in of_run if row.get("stage"))
    last = [_last(folder) for folder in folders]
    data: dict[str, Any] = {
        "name": " · ".join(names),
        "facts": "",
        "runs": [
            {
                "name": name,
                "facts": facts(folder, of_run),
                "evaluation": artifact,
                "problems": max((i.n for i in artifact.metrics.values()), default=0) if artifact else 0,
                "difference": _difference(last[0], artifact) if number else None,
            }
            for number, (name, folder, of_run, artifact) in enumerate(zip(names, folders, lines, last, strict=True))
        ],
        "shown": [name for name in SHOWN if any(a and name in a.metrics for a in last)],
        "stages": [{"name": s, "charts": _charts(names, lines, s), "phases": {}} for s in stages],
        "differing": differing([folder.path for folder in folders]), "metrics": {"first": [], "rest": []},
        "verdict": [], "evaluations": [], "comparisons": [], "breakdowns": [], "environment": [], "reproduce": [], "config": "",
        "pairs": {"names": [], "rows": [], "all": 0},
        "rollouts": {"rows": [], "prompts": [], "all": 0, "steps": 0, "all_steps": 0},
    }  # fmt: skip
    if not data["shown"] and not any(stage["charts"] for stage in data["stages"]):
        raise CheckpointError(
            f"{', '.join(names)}: nothing to report yet, no metrics and no evaluations; run them first"
        )
    place = overlay_path(runs) if to is None else to
    replace_text(place, render(data))
    return place


def differing(runs: Sequence[Path]) -> list[tuple[str, list[str]]]:
    """Return the settings that are not the same in all runs: key, and the value of each run."""
    settings = [flat(dict(read_settings(run).values)) for run in runs]
    keys = sorted({key for of_run in settings for key in of_run} - {"run_name", "output_dir", "description"})
    rows = [(key, ["–" if key not in s else one_line_yaml(s[key]) for s in settings]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _charts(
    names: Sequence[str], lines: Sequence[Sequence[dict[str, Any]]], stage: str
) -> list[dict[str, Any]]:
    """Return one chart per metric with a curve for each run that has it."""
    series = [metric_series(of_run, stage) for of_run in lines]
    plots = []
    for chart in every_chart():
        metric_names = sorted(
            {n for of_run in series for n in of_run if any(fnmatchcase(n, p) for p in chart.patterns)}
        )
        for metric in metric_names:
            curves = [
                curve | {"label": name}
                for name, of_run in zip(names, series, strict=True)
                if metric in of_run and (curve := curve_of(name, *of_run[metric])) is not None
            ]
            title = (
                chart.title
                if len(metric_names) == 1
                else f"{chart.title}: {short_label(metric, chart.strip)}"
            )
            if curves:
                plots.append(chart.drawn(curves) | {"title": title})
    return plots


def _last(folder: RunFolder) -> Artifact | None:
    names = artifact_names(folder.evaluations)
    name = next((stage for stage in reversed(EVALUATED) if stage in names), None)
    return read_artifact(folder.evaluations, name) if name else None


def _difference(first: Artifact | None, other: Artifact | None) -> dict[str, Any]:
    """Return the paired comparison of two evaluations, or why there is none."""
    if first is None or other is None:
        return {"result": None, "problem": "one of the two has no evaluation"}
    return compared(first, other)
