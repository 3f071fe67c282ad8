"""Arguments that several verbs share: a recipe with overrides, and where a model comes from."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.errors import CheckpointError, ConfigError, nearest
from algorist.store.stages import LAST_FIRST, STAGES, lost_model

if TYPE_CHECKING:
    from algorist.config.schema import Recipe


def _recipes(incomplete: str) -> list[str]:
    from algorist.config.load import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


RecipeArgument = Annotated[
    str,
    typer.Argument(
        help="A shipped recipe (algorist recipes list), a .yaml file, or a run's folder to continue it.",
        autocompletion=_recipes,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings as key=value, such as grpo.max_steps=200; all keys: algorist recipes show RECIPE --resolved."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the same folder.")]
_WHICH_MODEL = "Run, checkpoint, model folder or hub name; the newest run when left out."
ModelArgument = Annotated[str | None, typer.Argument(help=_WHICH_MODEL)]
ModelOption = Annotated[str | None, typer.Option(help=_WHICH_MODEL)]
Save = Annotated[
    Path | None, typer.Option(help="Append the answers to this JSONL file, one row per question.")
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="Prompt format: reasoning_answer, think_answer, working_solution, r1_zero, few_shot, boxed, last_number, question_only or another "
        "of docs/settings.md; the run's when left out.",
    ),
]
Length = Annotated[
    int | None,
    typer.Option(help="Longest completion in tokens; that of the model's training when left out.", min=1),
]
Template = Annotated[
    list[str] | None,
    typer.Option(
        "--template",
        metavar="KEY=VALUE",
        help="A switch of the model's chat template, such as enable_thinking=false; may be repeated.",
    ),
]


Tools = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,…",
        help="Tools to answer calls of, such as calculator or python,seconds=1; those of the model's training when left out.",
    ),
]
NoTools = Annotated[bool, typer.Option("--no-tools", help="Answer no calls; the model continues without.")]


def read_tools(tools: str | None, no_tools: bool) -> dict[str, Any] | None:
    """Return ``--tools`` as settings of who replies; an empty mapping for ``--no-tools``, None where neither was given.

    Raises:
        ConfigError: Both.
    """
    from algorist.config.yaml_text import read_yaml

    if tools is None:
        return {} if no_tools else None
    if no_tools:
        raise ConfigError("--tools and --no-tools are both given; leave one out")
    parts = [part.partition("=") for part in tools.split(",")]
    settings = {key: read_yaml(value, f"--tools {key}") for key, equals, value in parts if equals}
    return {"kind": "tools", "tools": {"use": [name for name, equals, _ in parts if not equals], **settings}}


def read_pairs(option: str, pairs: list[str] | None, example: str) -> dict[str, Any]:
    """Return an option's ``KEY=VALUE …``, the values read as YAML, or as they are where they are none.

    Raises:
        ConfigError: One is not KEY=VALUE.
    """
    from algorist.config.yaml_text import read_yaml

    values: dict[str, Any] = {}
    for text in pairs or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"{option} {text} is not KEY=VALUE; write for example {option} {example}")
        try:
            values[key] = read_yaml(value, f"{option} {key}")
        except ConfigError:
            values[key] = value
    return values


def read_template(options: list[str] | None) -> dict[str, Any]:
    """Return ``--template KEY=VALUE …`` as switches."""
    return read_pairs("--template", options, "enable_thinking=false")


_MODEL = ("config.json", "adapter_config.json")


def read_recipe(name: str, overrides: list[str] | None) -> Recipe:
    """Read a recipe by name or file; or that of a run's folder, which is where the run is continued."""
    from algorist.config.load import load_recipe, recipe_names

    folder, words = Path(name).expanduser(), overrides or []
    keys = {word.partition("=")[0] for word in words if not word.endswith("=null")}
    for stage in STAGES:
        if {f"{stage}.max_steps", f"{stage}.epochs"} <= keys:
            raise ConfigError(
                f"{stage}.max_steps and {stage}.epochs both say how long; max_steps wins: leave one out"
            )
    if name not in recipe_names() and _is_run(folder):
        name, folder = str(folder / "config.yaml"), folder.resolve()
        words = [f"output_dir={folder.parent}", f"run_name={folder.name}", *words]
    return load_recipe(name, words).recipe


def stage_alone(name: str, words: Sequence[str]) -> str | None:
    """Return the stage that a run was made of alone (``--only``), where its folder is the recipe of another run that names no stages."""
    from algorist.store.run_folder import RunFolder

    folder, named = Path(name).expanduser(), {f"{stage}.enabled" for stage in STAGES}
    if not _is_run(folder) or named & {word.partition("=")[0] for word in words}:
        return None
    run = RunFolder(folder)
    made = run.command()
    alone = [stage for stage in STAGES if ("--only", stage) in pairwise(made) or f"--only={stage}" in made]
    others = set(STAGES) - set(alone)
    return alone[0] if alone and not others & run.stages().keys() else None


def find_model(model: str | None, runs: Path = Path("runs")) -> tuple[Path | str, Path | None]:
    """Return (model folder or hub name, run folder if it belongs to one).

    ``model`` may be a run folder, a stage's ``final`` or ``checkpoint-N`` folder, any model folder or a hub name;
    None takes the newest run under ``runs`` that has a model.

    Raises:
        CheckpointError: There is no run, or the run has no finished stage.
    """
    import algorist.config.schema  # noqa: F401  # finds the loaders, which have names of their own
    from algorist.data.files import hub_is_away
    from algorist.models.loaders import hub_name

    if model is None:
        newest = sorted(runs.glob("*/config.yaml"), key=lambda p: p.stat().st_mtime, reverse=True)
        if not newest:
            raise CheckpointError(f"no run under {runs}/; give --model, or make one: algorist run quickstart")
        folder = next((p.parent for p in newest if _model_in(p.parent)), newest[0].parent)
    elif hub_name(model) != model:
        hub_is_away()
        return model, None
    else:
        folder = Path(model).expanduser()
        if not folder.exists():
            beside = [p.parent.name for p in folder.parent.glob("*/config.yaml")]
            is_path = folder.parent.is_dir() or folder.parts[0] in ("runs", "outputs", runs.name)
            if model.startswith((".", "/", "~")) or model.count("/") != 1 or is_path:
                runs_there = f" Runs in {folder.parent}: {', '.join(sorted(beside)[:8])}." if beside else ""
                raise ConfigError(
                    f"no run or model at '{model}'.{nearest(folder.name, beside) or runs_there} Expected a run folder, a model folder or "
                    "a hub name owner/model"
                )
            hub_is_away()
            return model, None
    if _is_run(folder):
        _refuse_lost_model(folder)
        trained = _model_in(folder)
        if trained is None:
            raise CheckpointError(
                f"{folder} has no trained model yet; continue it: algorist run {shlex.quote(str(folder))} --resume"
            )
        return trained, folder
    run = folder.parent.parent
    return folder, run if folder.parent.name in STAGES and _is_run(run) else None


def _is_run(folder: Path) -> bool:
    """Return whether a folder is a run's: it has a recipe, and it is no model that has a ``config.yaml`` of its own."""
    return (folder / "config.yaml").is_file() and not any((folder / name).is_file() for name in _MODEL)


def _refuse_lost_model(run: Path) -> None:
    """Refuse a run whose last model is gone: an earlier stage's is not what was asked for (CheckpointError)."""
    from algorist.store.run_folder import RunFolder

    finished = RunFolder(run).stages()
    if lost := next((stage for stage in LAST_FIRST if stage in finished and lost_model(run, stage)), None):
        raise CheckpointError(
            f"{lost} of {run} is finished, but its model, {run / lost / 'final'}, is gone or damaged. Make it again: algorist run {run} --resume; "
            "or name another one: --model FOLDER"
        )


def _model_in(run: Path) -> Path | None:
    """Return the folder of a run's last model: the last stage's ``final``, else the newest checkpoint."""
    for stage in LAST_FIRST:
        if (run / stage / "final").is_dir():
            return run / stage / "final"
    return max(run.glob("*/checkpoint-*"), key=lambda p: p.stat().st_mtime, default=None)
