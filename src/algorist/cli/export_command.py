"""``algorist export RUN_OR_MODEL --to FOLDER | --push-to-hub OWNER/NAME``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from algorist.cli.arguments import find_model
from algorist.config.load import load_run_recipe
from algorist.errors import ConfigError, nearest

app = typer.Typer(add_completion=False)
_DTYPES = ("auto", "float32", "bfloat16", "float16")


@app.command(
    epilog="Example: algorist export runs/quickstart --to my-model · Next: algorist solve 'Sam has 17 coins. Sam loses 2. Sam gives 2 to Lea. How many coins does Sam have now?' --model my-model"
)
def export(
    model: Annotated[str, typer.Argument(help="Run, stage folder, checkpoint, model folder or hub name.")],
    to: Annotated[Path | None, typer.Option("--to", help="A new folder for the model and its card.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into its base model.")] = False,
    dtype: Annotated[
        str, typer.Option(help=f"Type of merged weights: {', '.join(_DTYPES)}; auto is the base model's.")
    ] = "auto",
    push_to_hub: Annotated[
        str | None, typer.Option("--push-to-hub", metavar="OWNER/NAME", help="Upload it as well.")
    ] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository; default: private.")
    ] = None,
) -> int:
    """Write a model with its card into a folder, merged if wanted, and upload it if wanted."""
    if to is None and push_to_hub is None:
        raise ConfigError("nowhere to export to; give --to FOLDER, --push-to-hub OWNER/NAME or both")
    if dtype not in _DTYPES:
        raise ConfigError(
            f"--dtype {dtype} is unknown.{nearest(dtype, _DTYPES)} Expected one of {', '.join(_DTYPES)}"
        )
    folder, run = find_model(model)
    from algorist.cli.quiet import quiet_libraries

    quiet_libraries()
    from algorist.config.load import validate
    from algorist.hub.card import base_warning
    from algorist.hub.export import export as write_folder
    from algorist.hub.export import fetch
    from algorist.hub.upload import commit_message, require_token, upload

    recipe = load_run_recipe(run) if run else None
    target = None
    if push_to_hub is not None:
        values = recipe.hub.model_dump() if recipe else {}
        values |= {"push": True, "model_id": push_to_hub}
        values |= {} if private is None else {"private": private}
        target = validate({"hub": values}, where="--push-to-hub").hub
        require_token("--push-to-hub")
    source = folder if isinstance(folder, Path) else fetch(folder)
    if merge and not (source / "adapter_config.json").is_file():
        print("nothing to merge: this is a whole model already")
    with tempfile.TemporaryDirectory(prefix="algorist-export-") as temporary:
        place = to if to is not None else Path(temporary) / "model"
        names = write_folder(source, place, run=run, merge=merge, dtype=dtype, name=push_to_hub)
        if warning := base_warning(place):
            print(warning)
        if to is not None:
            print(f"wrote {place}: {', '.join(names)}")
        if target is not None:
            stage = source.parent.name if source.name == "final" or run else "export"
            message = target.commit_message or commit_message(recipe, stage, run.name if run else model)
            print(f"uploaded to {upload(place, target, name=str(push_to_hub), message=message, say=print)}")
    return 0
