"""``algorist compare A B``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)

ArtifactPath = Annotated[Path, typer.Argument(help="An evaluation: RUN/eval/NAME.json.")]


@app.command(epilog="Example: algorist compare runs/quickstart/eval/sft.json runs/quickstart/eval/grpo.json")
def compare(before: ArtifactPath, after: ArtifactPath) -> None:
    """Compare two evaluations of the same problems: paired differences with 95 % intervals."""
    from rich.console import Console

    from algorist.cli.display import closing_table
    from algorist.evaluation.artifact import read_artifact
    from algorist.evaluation.compare import paired_metrics

    first, second = (read_artifact(p.parent, p.name.removesuffix(".json")) for p in (before, after))
    closing_table(
        Console(),
        first.metrics,
        second.metrics,
        paired_metrics(first.samples, second.samples),
        (before.stem, after.stem),
    )
