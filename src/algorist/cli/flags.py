"""Options of ``run``, ``sft`` and ``grpo`` that stand for settings of the recipe: trackers and upload."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from algorist.cli.arguments import read_recipe

T = TypeVar("T")
WandbProject = Annotated[
    str | None, typer.Option("--wandb-project", help="Track with wandb, in this project (tracking.project).")
]
WandbEntity = Annotated[
    str | None, typer.Option("--wandb-entity", help="User or team in wandb (tracking.entity).")
]
NoWandb = Annotated[bool, typer.Option("--no-wandb", help="Leave wandb out, whatever the recipe says.")]
PushToHub = Annotated[bool, typer.Option("--push-to-hub", help="Upload the model after the run (hub.push).")]
HubModelId = Annotated[
    str | None,
    typer.Option("--hub-model-id", help="Repository owner/name; turns the upload on (hub.model_id)."),
]


def with_flags(command: Callable[..., T]) -> Callable[..., T]:
    """Give a verb ``(recipe, overrides, …)`` these options as well; it receives them as overrides."""

    def verb(
        *,
        recipe: str,
        overrides: list[str] | None,
        wandb_project: WandbProject = None,
        wandb_entity: WandbEntity = None,
        no_wandb: NoWandb = False,
        push_to_hub: PushToHub = False,
        hub_model_id: HubModelId = None,
        **own: Any,
    ) -> T:
        settings = {
            "tracking.project": wandb_project,
            "tracking.entity": wandb_entity,
            "hub.model_id": hub_model_id,
            "hub.push": push_to_hub or None,
        }
        added = [f"{key}={json.dumps(value)}" for key, value in settings.items() if value is not None]
        wandb = wandb_project is not None or wandb_entity is not None
        if wandb or no_wandb:
            resolved: Any = read_recipe(recipe, overrides)
            rest = [name for name in resolved.report_to if name != "wandb"]
            added.append(f"report_to={json.dumps([*rest, *(['wandb'] if wandb and not no_wandb else [])])}")
        return command(recipe, [*(overrides or []), *added], **own)

    own = inspect.signature(command, eval_str=True).parameters
    shared = inspect.signature(verb, eval_str=True).parameters
    added = [p for name, p in shared.items() if p.kind is p.KEYWORD_ONLY and name not in own]
    functools.update_wrapper(verb, command)
    vars(verb)["__signature__"] = inspect.Signature([*own.values(), *added], return_annotation=int)
    return verb
