"""``algorist report RUN``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: algorist report runs/quickstart · Next: open runs/quickstart/report.html")
def report(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Write a run's report.html: one file, opens offline."""
    from algorist.report.build import build_report

    print(build_report(run))
