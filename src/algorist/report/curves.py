"""Charts of the report and their metrics, thinned to what a screen can show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from algorist.declared import registered

POINTS = 600
MAIN_CHARTS = 4
"""Charts of a stage that are open; the others are folded."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: a title, what a healthy curve looks like, and patterns of metric names (first match names a curve).

    ``strip`` is cut off the curve's label. ``share`` scales the axis to 0 … 1; ``smooth`` lets the reader's smoothing act on it.
    """

    title: str
    note: str
    patterns: Sequence[str]
    strip: Sequence[str] = ()
    share: bool = False
    smooth: bool = True

    def drawn(self, curves: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the chart with its curves as the page takes it."""
        about = {name: getattr(self, name) for name in ("title", "note", "share", "smooth")}
        return about | {"curves": curves}


_FILE = Path(__file__).with_name("charts.yaml")
CHARTS = [Chart(**row) for row in yaml.safe_load(_FILE.read_text(encoding="utf-8"))]


def every_chart() -> list[Chart]:
    """Return the charts of a stage, then those that extensions bring."""
    return [*CHARTS, *(Chart(*chart) for cls in registered() for chart in cls.charts)]


def charts(lines: Sequence[dict[str, Any]], stage: str) -> list[dict[str, Any]]:
    """Return the charts of a stage that have at least two points: title, note, share, curves with x and y lists."""
    series = metric_series(lines, stage)
    taken: set[str] = set()
    plots = []
    for chart in every_chart():
        curves = []
        for name in [n for p in chart.patterns for n in sorted(series) if fnmatchcase(n, p)]:
            if name in taken:
                continue
            taken.add(name)
            if (curve := curve_of(short_label(name, chart.strip), *series[name])) is not None:
                curves.append(curve)
        if curves:
            plots.append(chart.drawn(curves[:8]))
    return plots


def curve_of(label: str, x: Sequence[int], y: Sequence[float]) -> dict[str, Any] | None:
    """Return a curve for a chart, thinned; None for fewer than two points."""
    x, y = thin(x, y)
    if len(x) < 2:
        return None
    summary = f"{y[0]:.3g} at step {x[0]}, {y[-1]:.3g} at step {x[-1]}"
    return {"label": label, "x": x, "y": y, "summary": summary}


def thin(x: Sequence[int], y: Sequence[float], points: int = POINTS) -> tuple[list[int], list[float]]:
    """Return at most ``points`` points: means of runs of equal length; a short curve is left as it is."""
    if len(x) <= points:
        return list(x), [_short(v) for v in y]
    size = math.ceil(len(x) / points)
    starts = range(0, len(x), size)
    return (
        [x[min(i + size, len(x)) - 1] for i in starts],
        [_short(math.fsum(y[i : i + size]) / len(y[i : i + size])) for i in starts],
    )


def phases(lines: Sequence[dict[str, Any]], stage: str) -> dict[str, float]:
    """Return the seconds that a stage spent in each phase: ``time/PHASE_s`` metrics and the rest of ``time/step_s``."""
    series = metric_series(lines, stage)
    seconds = {
        name.removeprefix("time/").removesuffix("_s"): math.fsum(y)
        for name, (_, y) in series.items()
        if name.startswith("time/") and name != "time/step_s"
    }
    total = math.fsum(series["time/step_s"][1]) if "time/step_s" in series else 0.0
    if total > sum(seconds.values()) > 0:
        seconds["other"] = total - sum(seconds.values())
    return seconds


SPENT = ("sampling", "grading", "update", "evaluation", "loading", "saving", "starting", "other")
"""Kinds of work that a run's seconds go to; those after the evaluation are overhead."""
_PHASE = {"rollout": "sampling", "reward": "grading", "batch": "update", "sft": "update"}


def where_time_went(seconds: Any, lines: Sequence[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Return (name, seconds, percent) for each of ``SPENT`` from a run's ``times.json``; GRPO's seconds by its phases."""
    pairs = seconds.items() if isinstance(seconds, dict) else ()
    numbers = {n: float(s) for n, s in pairs if isinstance(s, (int, float)) and 0 < s < math.inf}
    parts = phases(lines, "grpo")
    whole, sums = math.fsum(parts.values()), dict.fromkeys(SPENT, 0.0)
    for name, number in numbers.items():
        shares = {p: s / whole for p, s in parts.items()} if name == "grpo" and whole else {name: 1.0}
        for part, share in shares.items():
            part = _PHASE.get(part, part)
            sums[part if part in sums else "other"] += number * share
    total = math.fsum(sums.values())
    return [(name, value, 100 * value / total) for name, value in sums.items() if value > 0]


def metric_series(lines: Sequence[dict[str, Any]], stage: str) -> dict[str, tuple[list[int], list[float]]]:
    """Return (steps, values) of each metric of a stage; null and non-numbers are left out."""
    series: dict[str, tuple[list[int], list[float]]] = {}
    for line in lines:
        step = line.get("step")
        if line.get("stage") != stage or not isinstance(step, int):
            continue
        for name, value in line.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if number and math.isfinite(value) and name not in ("step", "time"):
                x, y = series.setdefault(name, ([], []))
                x.append(step)
                y.append(float(value))
    return series


def short_label(name: str, strip: Sequence[str]) -> str:
    """Return a metric's name without what its chart says already."""
    for part in strip:
        name = name.removesuffix(part) if part.startswith(("/", "_")) else name.removeprefix(part)
    return name.replace("_", " ")


def _short(value: float) -> float:
    return float(f"{value:.5g}")
