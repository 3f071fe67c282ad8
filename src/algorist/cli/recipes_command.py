"""``algorist recipes list`` and ``algorist recipes show NAME``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from algorist.cli.arguments import AsJson, Overrides
from algorist.store.safe_text import json_text

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="List and show recipes, and where each value comes from.",
    epilog="Example: algorist recipes show quickstart --resolved",
)


@app.command("list", epilog="Example: algorist recipes list")
def list_recipes(as_json: AsJson = False) -> None:
    """List the shipped recipes. Next: algorist recipes show NAME."""
    from algorist.config.load import load_recipe, recipe_names

    rows = [(name, load_recipe(name).recipe.description) for name in recipe_names()]
    if as_json:
        print(json.dumps([{"name": n, "description": d} for n, d in rows]))
        return
    width = max(len(n) for n, _ in rows)
    for name, description in rows:
        print(f"{name:<{width}}  {description}")


@app.command("settings", epilog="Example: algorist recipes settings")
def settings() -> None:
    """Print every key of a recipe as a Markdown page: meaning, values, default."""
    from algorist.config.explain import settings_page

    print(settings_page(), end="")


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
    """Show a recipe's values and where each comes from. Next: algorist run NAME."""
    from algorist.config.explain import describe as meaning_of
    from algorist.config.explain import explain
    from algorist.config.load import load_recipe

    rows = [r for r in explain(load_recipe(name, overrides or [])) if resolved or r[2] != "default"]
    if as_json:
        print(json.dumps([{"key": k, "value": v, "from": o} for k, v, o in rows]))
        return
    width = max(len(k) for k, _, _ in rows)
    for key, value, origin in rows:
        print(f"{key:<{width}}  {json_text(value)}  ({origin})")
        if describe and (meaning := meaning_of(key)):
            print(f"    {meaning}")
