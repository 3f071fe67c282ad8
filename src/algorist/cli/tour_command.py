"""``algorist tour``: the way through the verbs for those who have no documents at hand. Its steps are ``tour.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from algorist.cli.terminal import Result, View, verb

app = typer.Typer(add_completion=False)


class Tour(Result):
    """The way, and how far it was gone in this folder."""

    steps: Annotated[list[dict[str, Any]], "per step: says, commands, done"]

    def view(self, width: int) -> View:
        for number, step in enumerate(self.steps, start=1):
            yield f"{number}. {step['says']}{' (done)' if step['done'] else ''}"
            yield from (f"  {command}" for command in step["commands"])


@verb(app)
def tour() -> Tour:
    """Show the way from nothing to your own model, command by command, and which runs of it this folder has.

    Example: algorist tour
    """
    import yaml

    steps = yaml.safe_load(Path(__file__).with_name("tour.yaml").read_text(encoding="utf-8"))
    for step in steps:
        leaves = step.pop("leaves", None)
        step["done"] = Path(leaves).exists() if leaves else None
    return Tour(steps)
