"""``algorist recipes list`` and ``algorist recipes show NAME``."""

from __future__ import annotations

import json
import textwrap
from typing import Annotated

import typer

from algorist.cli.arguments import AsJson, Overrides
from algorist.cli.terminal import listing

app = typer.Typer(
    add_completion=False,
    help="List and show recipes, and where each value comes from.",
    epilog="Example: algorist recipes show quickstart --resolved",
)


@app.callback(invoke_without_command=True)
def recipes(context: typer.Context) -> None:
    """List and show recipes, and where each value comes from."""
    if context.invoked_subcommand is None:
        list_recipes()


@app.command("list", epilog="Example: algorist recipes list")
def list_recipes(as_json: AsJson = False) -> None:
    """List the shipped recipes. Next: algorist recipes show NAME."""
    from algorist.config.load import load_recipe, recipe_names

    names = recipe_names()
    listing([{"name": n, "description": load_recipe(n).recipe.description} for n in names], as_json)


@app.command("settings", epilog="Example: algorist recipes settings")
def settings() -> None:
    """Print every key of a recipe as a Markdown page: meaning, values, default."""
    from algorist.config.explain import settings_page

    print(settings_page(), end="")


@app.command("overview", epilog="Example: algorist recipes overview")
def overview() -> None:
    """Print what each shipped recipe trains, on what and for how long, as a Markdown page."""
    from algorist.config.explain import recipes_page

    print(recipes_page(), end="")


@app.command("presets", epilog="Example: algorist recipes presets")
def presets(as_json: AsJson = False) -> None:
    """Show what each grpo.preset stands for, with its paper. Next: algorist recipes show RECIPE grpo.preset=NAME."""
    from algorist.config.presets import preset_named, preset_names
    from algorist.config.yaml_text import one_line_yaml

    rows = [preset_named(name) for name in preset_names()]
    if as_json:
        print(
            json.dumps(
                [
                    {"name": p.name, "paper": p.paper, "description": p.description, "lines": p.lines}
                    for p in rows
                ]
            )
        )
        return
    for preset in rows:
        print(f"# {preset.name}, https://arxiv.org/abs/{preset.paper}")
        print(textwrap.fill(preset.description, 78, initial_indent="# ", subsequent_indent="# "))
        print("grpo:")
        for key, value in preset.lines["grpo"].items():
            print(f"  {key}: {one_line_yaml(value)}")
        print()


@app.command("rules", epilog="Example: algorist recipes rules")
def rules() -> None:
    """Print the rules of preflight, diagnose and the warnings of a running training as a Markdown page."""
    from algorist.diagnosis.page import troubleshooting_page

    print(troubleshooting_page(), end="")


@app.command("show", epilog="Example: algorist recipes show quickstart grpo.max_steps=20 --resolved")
def show(
    name: Annotated[str, typer.Argument(help="A shipped recipe or a .yaml file.")],
    overrides: Overrides = None,
    resolved: Annotated[bool, typer.Option("--resolved", help="Show all values, defaults included.")] = False,
    describe: Annotated[
        bool, typer.Option("--describe", help="Say what each key means and which values it takes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a recipe's values and where each comes from, as a file that can be changed and run. Next: algorist run NAME."""
    from algorist.config.explain import annotated_yaml, explain
    from algorist.config.explain import describe as meaning_of
    from algorist.config.load import load_recipe

    loaded = load_recipe(name, overrides or [])
    rows = [r for r in explain(loaded) if resolved or r[2] != "default"]
    if as_json:
        print(json.dumps([{"key": k, "value": v, "from": o} for k, v, o in rows]))
        return
    loss = loaded.recipe.grpo.loss.name
    print(annotated_yaml(rows, lambda key: meaning_of(key, loss) if describe else ""), end="")
