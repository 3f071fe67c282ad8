"""Arguments that several verbs share: a recipe with overrides, and where a model comes from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from algorist.config.schema import Recipe

RecipeArgument = Annotated[
    str, typer.Argument(help="A shipped recipe (algorist recipes list) or a .yaml file.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings as key=value, such as grpo.max_steps=200.")
]


def read_recipe(name: str, overrides: list[str] | None) -> Recipe:
    """Return the resolved recipe."""
    from algorist.config.load import load_recipe

    return load_recipe(name, overrides or []).recipe


def find_model(model: str | None, runs: Path = Path("runs")) -> tuple[Path | str, Path | None]:
    """Return (model folder or hub name, run folder if it belongs to one).

    ``model`` may be a run folder, a stage's ``final`` or ``checkpoint-N`` folder, any model folder or a hub name;
    None takes the newest run under ``runs``.

    Raises:
        CheckpointError: There is no run, or the run has no finished stage.
    """
    if model is None:
        found = sorted((p for p in runs.glob("*/config.yaml")), key=lambda p: p.stat().st_mtime)
        if not found:
            raise CheckpointError(f"no run under {runs}/; give --model, or make one: algorist run quickstart")
        folder = found[-1].parent
    else:
        folder = Path(model).expanduser()
        if not folder.exists():
            if model.startswith((".", "/", "~")) or model.count("/") != 1:
                raise ConfigError(
                    f"no run or model at '{model}'; expected a run folder, a model folder or a hub name owner/model"
                )
            return model, None
    if (folder / "config.yaml").is_file():
        for stage in ("grpo", "sft"):
            if (folder / stage / "final").is_dir():
                return folder / stage / "final", folder
        checkpoints = sorted(folder.glob("*/checkpoint-*"), key=lambda p: p.stat().st_mtime)
        if checkpoints:
            return checkpoints[-1], folder
        raise CheckpointError(f"{folder} has no trained model yet; continue it with algorist run … --resume")
    run = next((p for p in folder.parents if (p / "config.yaml").is_file()), None)
    return folder, run


def rows_from_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file."""
    from algorist.data.files import read_rows

    return read_rows(path)
