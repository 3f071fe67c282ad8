"""``algorist watch RUN`` and ``report``: a run as it trains, and its page."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from algorist.cli.terminal import Result, View, console, printing_above, say, verb
from algorist.errors import DAMAGED
from algorist.store.run_log import clock
from algorist.store.safe_text import printable
from algorist.store.stages import checkpoints

if TYPE_CHECKING:
    from rich.console import RenderableType

    from algorist.store.run_folder import RunFolder

app = typer.Typer(add_completion=False)
report_app = typer.Typer(add_completion=False)
BARS = "▁▂▃▄▅▆▇█"
CURVES = (
    ("loss", "loss"),
    ("reward", "reward"),
    ("rewards/correct/mean", "accuracy"),
    ("groups/useful_share", "useful groups"),
    ("completions/mean_length", "tokens"),
    ("entropy", "entropy"),
    ("grad_norm", "gradient norm"),
    ("eval/greedy_accuracy", "held-out accuracy"),
)


class State(Result):
    """State of a run."""

    run: Annotated[str, "the run folder"]
    running: Annotated[bool, "whether a process trains there"]
    finished_stages: Annotated[list[str], "in their order"]
    stage: Annotated[str | None, "of the last line of metrics"]
    step: Annotated[int | None, "of the last line"]
    steps: Annotated[int | None, "of the stage, as planned"]
    seconds_left: Annotated[float | None, "of the stage, by the pace so far"]
    seconds_since_last_line: Annotated[float | None, "age of the last line"]
    curves: Annotated[dict[str, list[float]], "label → values of the stage"]
    findings: Annotated[list[str], "what diagnose finds, one line each"]

    def view(self, width: int) -> View:
        """A head, a line per curve, drawn in blocks, with its first, best and last value, the findings."""
        from rich.table import Table
        from rich.text import Text

        age, total = self.seconds_since_last_line, f"/{self.steps}" if self.steps else ""
        where = f"{self.stage} {self.step}{total}" if self.stage else "no step yet"
        head = (
            f"{self.run} · {'running' if self.running else 'not running'} · {where}"
            + (f" · last line {clock(age)} ago" if age is not None else "")
            + f" · finished: {', '.join(self.finished_stages) or 'nothing'}"
        )
        curves = Table(box=None, pad_edge=False)
        for name in ("", "first", "last", "low", "high", ""):
            curves.add_column(name, justify="right" if name else "left", no_wrap=True)
        for label, values in self.curves.items():
            numbers = (f"{v:.3g}" for v in (values[0], values[-1], min(values), max(values)))
            curves.add_row(label, *numbers, blocks(values))
        yield Text(printable(head), style="bold")
        yield curves
        for line in self.findings:
            yield Text(printable(line), style="yellow")


@verb(app)
def watch(
    run: Path,
    every: Annotated[float, typer.Option(min=0.1)] = 2.0,
    once: bool = False,
    web: bool = False,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 0,
    beside: Annotated[list[Path] | None, typer.Option(metavar="RUN")] = None,
    as_json: bool = False,
) -> State:
    """Watch a run from another window: where it is, its curves, what is wrong. Ends with the run, or with Ctrl-C.

    Args:
        run: A run folder; the run may be in another window.
        every: Seconds between two looks.
        once: Look once and end.
        web: A live page for a browser on this machine, until Ctrl-C.
        port: Port of --web; 0: any that is free.
        beside: Another run, whose curves and figures join those of this one (with --web; may be repeated).

    Example: algorist watch runs/quickstart · algorist watch runs/quickstart --web · Next: algorist diagnose
    runs/quickstart
    """
    from rich.live import Live

    from algorist.store.run_folder import RunFolder

    folder = RunFolder.open(run)
    if web:
        _serve(folder, port, every, [RunFolder.open(other) for other in beside or ()])
    drawn = console()
    if web or once or as_json or not drawn.can_redraw:
        return state(folder)
    live = Live(
        picture(state(folder)),
        console=drawn,
        refresh_per_second=4,
        redirect_stdout=False,
        redirect_stderr=False,
        transient=True,
    )
    with printing_above(drawn), live:
        while folder.is_running():
            time.sleep(every)
            live.update(picture(state(folder)))
    return state(folder)


def _serve(folder: RunFolder, port: int, every: float, others: list[RunFolder]) -> None:
    """Serve the live page until Ctrl-C."""
    from algorist.report.build import HOST, LivePage, make_server

    server, address = make_server(LivePage(folder, lambda: vars(state(folder)), every, others), port)
    number = server.server_address[1]
    say(
        f"{folder.path}, live, for this machine only and whoever knows the token (Ctrl-C ends the page, not the run):"
    )
    print(f"  {address}", flush=True)
    say(f"From elsewhere: ssh -L {number}:{HOST}:{number} THIS_MACHINE, then the same address there")
    with server:
        server.serve_forever()


def state(folder: RunFolder) -> State:
    """Return the state of a run."""
    from algorist.diagnosis.diagnose import diagnose
    from algorist.store.read import metrics

    lines = metrics(folder.path)
    last = lines[-1] if lines else {}
    stage = last.get("stage")
    curves = {
        label: [line[name] for line in lines if line.get("stage") == stage and line.get(name) is not None]
        for name, label in CURVES
    }
    steps = _steps(folder, stage)
    return State(
        run=str(folder.path),
        running=folder.is_running(),
        finished_stages=list(folder.stages()),
        stage=stage,
        step=last.get("step"),
        steps=steps,
        seconds_left=None if stage in folder.stages() else _seconds_left(lines, steps),
        seconds_since_last_line=round(time.time() - last["time"], 1) if "time" in last else None,
        curves={label: values for label, values in curves.items() if values},
        findings=[finding.one_line() for finding in diagnose(folder.path)],
    )


def _seconds_left(lines: list[dict[str, Any]], steps: int | None) -> float | None:
    """Return about how long the stage of the last line still takes, by the pace of its lines."""
    stage = lines[-1].get("stage") if lines else None
    timed = [
        (line["step"], line["time"])
        for line in lines
        if line.get("stage") == stage and isinstance(line.get("step"), int) and "time" in line
    ]
    if steps is None or len(timed) < 2 or timed[-1][0] <= timed[0][0]:
        return None
    paces = [
        (now - then) / (step - before)
        for (before, then), (step, now) in itertools.pairwise(timed)
        if step > before
    ]
    return round(max(0, steps - timed[-1][0]) * median(paces), 1)  # of a resumed run the pause is one of many


def _steps(folder: RunFolder, stage: str | None) -> int | None:
    """Return the last step of a stage: what the recipe says, else what its newest checkpoint says, else None."""
    from algorist.diagnosis.signals import read_settings

    steps = read_settings(folder.path).get(f"{stage}.max_steps")
    if steps is not None or stage is None:
        return steps
    states = [p / "trainer_state.json" for p in checkpoints(folder.path / stage)]
    newest = next(filter(Path.is_file, states), None)
    try:
        return None if newest is None else int(json.loads(newest.read_text(encoding="utf-8"))["max_steps"])
    except DAMAGED:
        return None


def picture(now: State) -> RenderableType:
    """Return the state as one drawing, to be drawn again."""
    from rich.console import Group

    return Group(*cast(Any, now.view(console().width)))


def blocks(values: list[float]) -> str:
    """Return a curve as at most 24 block characters, each the mean of its share of the values."""
    count = min(24, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


class Report(Result):
    """The page that was written."""

    report: Annotated[str, "the HTML file"]

    def view(self, width: int) -> View:
        yield self.report


@verb(report_app)
def report(runs: list[Path], to: Path | None = None) -> Report:
    """Write a run's report.html, or one page about several runs: curves, final figures, paired differences. Opens offline.

    Args:
        runs: A run folder; several are laid over each other.
        to: File of the page about several runs.

    Example: algorist report runs/quickstart · Next: open runs/quickstart/report.html
    """
    from algorist.report.build import build_overlay, build_report

    return Report(str(build_report(runs[0]) if len(runs) == 1 and to is None else build_overlay(runs, to)))
