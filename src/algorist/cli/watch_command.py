"""``algorist watch RUN``."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.terminal import console, printing_above
from algorist.errors import DAMAGED
from algorist.store.run_log import clock
from algorist.store.safe_text import printable
from algorist.store.stages import checkpoints

if TYPE_CHECKING:
    from rich.console import RenderableType

    from algorist.store.run_folder import RunFolder

app = typer.Typer(add_completion=False)
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


@app.command(epilog="Example: algorist watch runs/quickstart · Next: algorist diagnose runs/quickstart")
def watch(
    run: Annotated[Path, typer.Argument(help="A run folder; the run may be in another window.")],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Look once, print one JSON object.")] = False,
) -> None:
    """Watch a run from another window: where it is, its curves, what is wrong. Ends with the run, or with Ctrl-C."""
    from rich.live import Live

    from algorist.store.run_folder import RunFolder

    folder = RunFolder.open(run)
    if as_json:
        print(json.dumps(state(folder)))
        return
    drawn = console()
    if once or not drawn.is_terminal:
        drawn.print(picture(state(folder)))
        return
    live = Live(
        picture(state(folder)),
        console=drawn,
        refresh_per_second=4,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with printing_above(drawn), live:
        while folder.is_running():
            time.sleep(every)
            live.update(picture(state(folder)))


def state(folder: RunFolder) -> dict[str, Any]:
    """Return where a run is: running or not, stage, step, age of its last line in seconds, curves, findings."""
    from algorist.diagnosis.diagnose import diagnose
    from algorist.store.read import metrics

    lines = metrics(folder.path)
    last = lines[-1] if lines else {}
    stage = last.get("stage")
    curves = {
        label: [line[name] for line in lines if line.get("stage") == stage and line.get(name) is not None]
        for name, label in CURVES
    }
    return {
        "run": str(folder.path),
        "running": folder.is_running(),
        "finished_stages": list(folder.stages()),
        "stage": stage,
        "step": last.get("step"),
        "steps": _steps(folder, stage),
        "seconds_since_last_line": round(time.time() - last["time"], 1) if "time" in last else None,
        "curves": {label: values for label, values in curves.items() if values},
        "findings": [finding.one_line() for finding in diagnose(folder.path)],
    }


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


def picture(now: dict[str, Any]) -> RenderableType:
    """Return the state as a table: one line per curve, drawn in blocks, with its first, best and last value."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    age = now["seconds_since_last_line"]
    total = f"/{now['steps']}" if now["steps"] else ""
    where = f"{now['stage']} {now['step']}{total}" if now["stage"] else "no step yet"
    head = (
        f"{now['run']} · {'running' if now['running'] else 'not running'} · {where}"
        + (f" · last line {clock(age)} ago" if age is not None else "")
        + f" · finished: {', '.join(now['finished_stages']) or 'nothing'}"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("", "first", "last", "low", "high", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for label, values in now["curves"].items():
        numbers = (f"{v:.3g}" for v in (values[0], values[-1], min(values), max(values)))
        table.add_row(label, *numbers, blocks(values))
    found = [Text(printable(line), style="yellow") for line in now["findings"]]
    return Group(Text(printable(head), style="bold"), table, *found)


def blocks(values: list[float]) -> str:
    """Return a curve as at most 24 block characters, each the mean of its share of the values."""
    count = min(24, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)
