"""Writes ``report.html``: one file, no network, every text of a model shown as text."""

from __future__ import annotations

import errno
import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from algorist import __version__
from algorist.config.yaml_text import flat, one_line_yaml
from algorist.diagnosis.signals import read_settings
from algorist.errors import CheckpointError, ConfigError, DataError
from algorist.evaluation.artifact import Artifact, artifact_names, read_artifact
from algorist.evaluation.compare import without_the_form
from algorist.evaluation.estimators import Interval, is_share
from algorist.report.collect import collect, compared, facts
from algorist.report.curves import MAIN_CHARTS, curve_of, every_chart, metric_series, short_label
from algorist.store.atomic import replace_text
from algorist.store.read import metrics
from algorist.store.redact import with_texts
from algorist.store.run_folder import RunFolder
from algorist.store.safe_text import printable
from algorist.store.stages import EVALUATED, STAGES

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
    """Render the page from ``collect``'s result; names of metrics and datasets are as foreign as completions.

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
        measured=[e for e in data["evaluations"] if not e["between"] and "greedy_accuracy" in e["metrics"]],
        whole=next((c for c in reversed(data["comparisons"]) if _compares_accuracy(c)), None),
        live=live,
        is_share=is_share,
        assets={
            name: here.joinpath(name).read_text(encoding="utf-8")
            for name in ("uplot.js", "uplot.css", "uplot.LICENSE.txt", "report.css", "report.js", "live.js")
        },
    )


def _compares_accuracy(comparison: dict[str, Any]) -> bool:
    return comparison["result"] is not None and "greedy_accuracy" in comparison["result"].differences


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
    """Return the position of a share and its interval on a bar, in percent of its width."""
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


# ---- A run's report as a live page: a server for this machine only, read only, protected by a token in the address

HOST = "127.0.0.1"
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
GROWING = ("metrics.jsonl", "stages.json", "trackers.json", "eval", "rollouts")
"""Paths that a run adds to; the page is made again when one of these changes."""


def version_of(folder: RunFolder) -> str:
    """Return a text that changes when the run has grown."""
    files = [file for name in GROWING for file in [folder.path / name, *(folder.path / name).glob("*")]]
    newest = [stat for file in files if (stat := _stat(file))]
    return f"{sum(size for size, _ in newest)}-{max((time for _, time in newest), default=0)}-{len(newest)}"


def _stat(file: Any) -> tuple[int, int] | None:
    try:
        stat = file.stat()
    except OSError:  # a temporary file that was renamed
        return None
    return stat.st_size, stat.st_mtime_ns


class LivePage:
    """The page and the state of one run, beside others if wished; the page is made once for each version of the run."""

    def __init__(
        self,
        folder: RunFolder,
        state: Callable[[], dict[str, Any]],
        every: float,
        others: Sequence[RunFolder] = (),
    ) -> None:
        self.folder, self._state, self.every, self.others = folder, state, every, others
        self._made: tuple[str, str] = ("", "")
        self._lock = threading.Lock()

    def page(self) -> str:
        """Return the present report as a live page."""
        with self._lock:
            version = version_of(self.folder)
            if version != self._made[0]:
                live = {"every": self.every, "version": version}
                data = collect(self.folder)
                if self.others:
                    data = beside(data, [self.folder, *self.others])
                self._made = version, render(data, live=live)
            return self._made[1]

    def state(self) -> str:
        """Return the run's state as JSON."""
        state = with_texts({**self._state(), "version": version_of(self.folder)}, printable)
        return json.dumps(state, default=str)


def make_server(live: LivePage, port: int = 0, token: str | None = None) -> tuple[ThreadingHTTPServer, str]:
    """Return a server that is bound but does not serve yet, and the address to open.

    Args:
        live: The page.
        port: 0 takes any that is free.
        token: The secret in the address; a new one when left out.

    Raises:
        ConfigError: The port cannot be taken.
    """
    secret = token or secrets.token_urlsafe(16)

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "algorist", ""
        timeout = 30

        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            parts = self.path.partition("?")[0].split("/")
            known = len(parts) == 3 and secrets.compare_digest(parts[1].encode(), secret.encode())
            if host not in (HOST, "localhost") or not known or parts[2] not in ("", "state"):
                self.answer(404, "text/plain", "not found\n")
                return
            try:
                kind, text = (
                    ("text/html", live.page()) if not parts[2] else ("application/json", live.state())
                )
            except Exception as error:  # the run continues, and so does the page
                self.answer(503, "text/plain", printable(f"{type(error).__name__}: {error}\n"))
                return
            self.answer(200, kind, text)

        do_HEAD = do_GET

        def answer(self, code: int, kind: str, text: str) -> None:
            body = text.encode("utf-8", "replace")
            self.send_response(code)
            for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing: the address holds the token."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A browser that went away is no news."""

    try:
        server = Server((HOST, port), Handler)
    except OSError as error:
        taken = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise ConfigError(
            f"port {port} of {HOST} {taken}; take another, --port {port + 1}, or leave it out"
        ) from None
    except OverflowError:
        raise ConfigError(f"--port is {port}; expected a number from 1 to 65535, or 0 for any") from None
    return server, f"http://{HOST}:{server.server_address[1]}/{secret}/"


# ---- several runs in one page: the curves of all in each chart, their final figures, and each run's paired difference to the first

SHOWN = ("greedy_accuracy", "lenient_accuracy", "pass@1", "format", "truncated", "mean_tokens")
MOST = 8
"""Most runs in one page: their colours can be told apart."""


def overlay_path(runs: Sequence[Path]) -> Path:
    """Return the default path of these runs' page: beside the first of them, named for all."""
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
    names = _names(places)
    lines = [metrics(folder.path) for folder in folders]
    stages = dict.fromkeys(str(row["stage"]) for of_run in lines for row in of_run if row.get("stage"))
    data: dict[str, Any] = {
        "name": " · ".join(names), "facts": "", **_side_by_side(folders, names, lines),
        "stages": [{"name": s, "charts": _charts(names, lines, s), "phases": {}} for s in stages], "metrics": {"first": [], "rest": []},
        "verdict": [], "spent": [], "evaluations": [], "comparisons": [], "breakdowns": [], "environment": [], "reproduce": [], "config": "",
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


def _names(places: Sequence[Path]) -> list[str]:
    """Return a name for each run folder, with the folder around it where two are called the same."""
    alike = [place.name for place in places]
    return [p.name if alike.count(p.name) == 1 else f"{p.parent.name}/{p.name}" for p in places]


def _side_by_side(
    folders: Sequence[RunFolder], names: Sequence[str], lines: Sequence[Sequence[dict[str, Any]]]
) -> dict[str, Any]:
    """Return the final figures of several runs, each one's paired difference to the first, and the settings that differ."""
    last = [_last(folder) for folder in folders]
    runs = [
        {
            "name": name,
            "facts": facts(folder, of_run),
            "evaluation": artifact,
            "problems": max((i.n for i in artifact.metrics.values()), default=0) if artifact else 0,
            "difference": _difference(last[0], artifact) if number else None,
        }
        for number, (name, folder, of_run, artifact) in enumerate(
            zip(names, folders, lines, last, strict=True)
        )
    ]
    shown = [name for name in SHOWN if any(a and name in a.metrics for a in last)]
    return {"runs": runs, "shown": shown, "differing": differing([folder.path for folder in folders])}


def beside(data: dict[str, Any], folders: Sequence[RunFolder]) -> dict[str, Any]:
    """Return the data of the first run's page with the curves and final figures of the others in it."""
    names = _names([folder.path.resolve() for folder in folders])
    lines = [metrics(folder.path) for folder in folders]
    stages = []
    for stage in data["stages"]:
        stages.append(stage | {"charts": _charts(names, lines, stage["name"]) or stage["charts"]})
    return data | _side_by_side(folders, names, lines) | {"stages": stages}


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
            if curves:
                part = f": {short_label(metric, chart.strip)}" if len(metric_names) > 1 else ""
                plots.append(chart.drawn(curves) | {"title": chart.title + part})
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
