"""Writes ``report.html``: one file, no network, every text of a model shown as text."""

from __future__ import annotations

import json
import math
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from algorist import __version__
from algorist.errors import CheckpointError
from algorist.evaluation.compare import without_the_form
from algorist.evaluation.estimators import Interval, is_share
from algorist.report.collect import collect
from algorist.report.curves import MAIN_CHARTS
from algorist.store.atomic import replace_text
from algorist.store.redact import with_texts
from algorist.store.run_folder import RunFolder
from algorist.store.safe_text import printable
from algorist.store.stages import STAGES

TITLES = {
    "greedy_accuracy": "greedy accuracy",
    "lenient_accuracy": "last number right, whatever the form",
    "format": "well-formed",
    "truncated": "truncated",
    "mean_tokens": "mean tokens",
    "reasoning_present": "has reasoning",
    "mean_reasoning_characters": "reasoning, characters",
}


def build_report(run_folder: Path) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    A run that is still going, or that stopped early, gives a report of what is there.

    Raises:
        CheckpointError: There is no run, it is damaged, or the file cannot be written.
    """
    run = RunFolder.open(Path(run_folder))
    data = collect(run)
    if not any((data["evaluations"], data["stages"], data["rollouts"]["rows"])):
        raise CheckpointError(
            f"{run.path} has nothing to report yet: no metrics, rollouts or evaluations; run it first"
        )
    replace_text(run.report, render(data))
    return run.report


def render(data: dict[str, Any], live: dict[str, Any] | None = None) -> str:
    """Return the page for what ``collect`` returned; names of metrics and datasets are as foreign as completions.

    With ``live`` (``every``: seconds between two looks, ``version``: of the run) the page follows the run through its server.
    """
    data = with_texts(data, printable)
    here = files("algorist.report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: here.joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"interval": interval, "clock": clock, "without_the_form": without_the_form}
    environment.filters["stage"] = lambda name: name.upper() if name in STAGES else name
    shown = {key: data[key] for key in ("stages", "pairs", "rollouts")}
    return environment.get_template("report.html.j2").render(
        data=data,
        titles=TITLES,
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        payload=embedded_json(shown),
        position=position,
        main_charts=MAIN_CHARTS,
        live=live,
        is_share=is_share,
        assets={
            name: here.joinpath(name).read_text(encoding="utf-8")
            for name in ("uplot.js", "uplot.css", "uplot.LICENSE.txt", "report.css", "report.js", "live.js")
        },
    )


def embedded_json(value: Any) -> str:
    """Return JSON that cannot end its script element nor hold what an old parser takes for a line end."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def interval(number: Interval | None, name: str = "", *, signed: bool = False) -> str:
    """Return ``62.0 % [56.1, 67.5]``, or ``+12.4 points [+7.0, +17.5]``; a dash for an evaluation that is not there."""
    return "–" if number is None else number.text(name, signed=signed)


def position(number: Interval) -> dict[str, float]:
    """Return where a share and its interval lie on a bar, in percent of its width."""
    low = number.value if math.isnan(number.low) else number.low
    high = number.value if math.isnan(number.high) else number.high
    return {
        "value": round(100 * number.value, 2),
        "low": round(100 * low, 2),
        "width": round(100 * (high - low), 2),
    }


def clock(seconds: float) -> str:
    """Return ``1 h 02 min``, ``3 min 05 s`` or ``4.2 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
