"""``algorist grpo RECIPE``."""

from __future__ import annotations

from typing import Annotated

import typer

from algorist.cli.arguments import Overrides, RecipeArgument
from algorist.cli.run_command import (
    HubModelId,
    NoWandb,
    PushToHub,
    WandbEntity,
    WandbProject,
    run_stages,
    with_flags,
)

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: algorist grpo quickstart run_name=first --resume · Next: algorist inspect runs/first"
)
def grpo(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Start from the SFT stage in the same folder, or continue GRPO there."),
    ] = False,
    wandb_project: WandbProject = None,
    wandb_entity: WandbEntity = None,
    no_wandb: NoWandb = False,
    push_to_hub: PushToHub = False,
    hub_model_id: HubModelId = None,
) -> int:
    """Do the GRPO stage of a recipe: from the finished SFT stage of the folder, or from the recipe's model."""
    overrides = with_flags(
        recipe, overrides, wandb_project, wandb_entity, no_wandb, push_to_hub, hub_model_id
    )
    return run_stages(recipe, overrides, resume, ("grpo",))
