"""``algorist report RUN …``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from algorist.cli.terminal import say

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: algorist report runs/quickstart · Next: open runs/quickstart/report.html")
def report(
    runs: Annotated[list[Path], typer.Argument(help="A run folder; several are laid over each other.")],
    to: Annotated[Path | None, typer.Option(help="File of the page about several runs.")] = None,
) -> None:
    """Write a run's report.html, or one page about several runs: curves, final figures, paired differences. Opens offline."""
    from algorist.report.build import build_report
    from algorist.report.overlay import build_overlay

    say(str(build_report(runs[0]) if len(runs) == 1 and to is None else build_overlay(runs, to)))
