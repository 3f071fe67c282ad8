"""``algorist sft RECIPE``."""

from __future__ import annotations

import typer

from algorist.cli.arguments import Overrides, RecipeArgument, Resume
from algorist.cli.flags import with_flags
from algorist.cli.run_command import run_stages

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: algorist sft quickstart run_name=first · Next: algorist grpo quickstart run_name=first --resume"
)
@with_flags
def sft(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    resume: Resume = False,
) -> int:
    """Do the supervised fine-tuning stage of a recipe and evaluate it."""
    return run_stages(recipe, overrides, resume, ("sft",))
