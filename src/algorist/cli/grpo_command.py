"""``algorist grpo RECIPE``."""

from __future__ import annotations

from typing import Annotated

import typer

from algorist.cli.arguments import Overrides, RecipeArgument
from algorist.cli.flags import with_flags
from algorist.cli.run_command import run_stages

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: algorist grpo quickstart run_name=first --resume · Next: algorist inspect runs/first"
)
@with_flags
def grpo(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Start from the SFT stage in the same folder, or continue GRPO there."),
    ] = False,
) -> int:
    """Do the GRPO stage of a recipe: from the finished SFT stage of the folder, or from the recipe's model."""
    return run_stages(recipe, overrides, resume, ("grpo",))
