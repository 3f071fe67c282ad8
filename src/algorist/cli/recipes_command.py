"""``algorist recipes``: what is shipped, what a recipe resolves to, and the pages that are made from code."""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from algorist.cli.arguments import Overrides
from algorist.cli.terminal import Line, Result, TableResult, View, keys_of, render, verb

app = typer.Typer(
    add_completion=False,
    help="List and show recipes, and where each value comes from.",
    epilog="Example: algorist recipes show quickstart --resolved",
)
MARKDOWN = "Pages of the documentation, as Markdown"
PAGES = {
    "settings": ("algorist.cli.explain", "settings_page", "every key of a recipe: meaning, values, default"),
    "overview": ("algorist.cli.explain", "recipes_page", "what each shipped recipe trains, on what and for how long"),
    "rules": ("algorist.diagnosis.diagnose", "troubleshooting_page", "the rules of preflight, diagnose and the warnings of a training"),
    "json": (__name__, "json_page", "the keys of each verb's --json"),
}  # fmt: skip


@app.callback(invoke_without_command=True)
def recipes(context: typer.Context) -> None:
    """List and show recipes, and where each value comes from."""
    if context.invoked_subcommand is None:
        render(list_recipes(), as_json=False)


@verb(app, "list")
def list_recipes() -> TableResult:
    """List the shipped recipes, first those that need no hub, then lines of published methods to extend. Next: algorist recipes show NAME.

    Example: algorist recipes list
    """
    from algorist.cli.explain import in_order
    from algorist.config.load import preset_names, recipe_text

    rows = [{"name": recipe.name, "description": recipe.description} for recipe in in_order()]
    for name in preset_names():
        about = re.match(r"# (.*?)\n# Paper: (\S+)", recipe_text(name), re.S)
        rows.append({"name": name, "description": f"{about[1]} {about[2]}" if about else ""})
    return TableResult(rows)


def _prints(module: str, function: str) -> Callable[[], None]:
    return lambda: print(getattr(importlib.import_module(module), function)(), end="")


for _name, (_module, _function, _what) in PAGES.items():
    app.command(
        _name, help=f"Print {_what}.", epilog=f"Example: algorist recipes {_name}", rich_help_panel=MARKDOWN
    )(_prints(_module, _function))


@app.command("results", rich_help_panel=MARKDOWN)
def results(folder: Annotated[Path, typer.Argument()] = Path("docs/results")) -> None:
    """Print the result.json files in a folder, a line of Markdown each.

    Example: algorist recipes results docs/results
    """
    from algorist.report.results import results_table

    print(results_table(folder), end="")


def json_page() -> str:
    """Return ``docs/json.md``: the keys of each verb's object, from the types that the verbs return."""
    from algorist.cli.verbs import VERBS, app_of

    lines = [
        "# What `--json` prints",
        "",
        "One JSON object on standard output; progress, notes and errors go to standard error. A number that is not defined",
        "(NaN) is null. A list (`recipes list`, `data list`, `rewards list`) has `rows`, an object per line, its headings as",
        "keys. Written by `algorist recipes json`.",
    ]
    for name in VERBS:
        for command in app_of(name).registered_commands:
            returned = vars(command.callback).get("returns")
            if returned in (None, TableResult):
                continue
            lines += ["", f"## {name}{f' {command.name}' if command.name else ''}", ""]
            lines += [
                textwrap.fill(f"- `{key}`: {meaning}", 118, subsequent_indent="  ", break_on_hyphens=False)
                for key, meaning in keys_of(returned).items()
            ]
    return "\n".join(lines) + "\n"


class Resolved(Result):
    """The values of a recipe."""

    values: Annotated[list[dict[str, Any]], "per key: key, value, from (file, command line, default)"]
    page: str

    def view(self, width: int) -> View:
        yield Line(self.page.rstrip("\n"), whole=True)


@verb(app, "show")
def show(name: str, overrides: Overrides = None, resolved: bool = False, describe: bool = False) -> Resolved:
    """Show a recipe's values and where each comes from, as a file that can be changed and run. Next: algorist run NAME.

    Args:
        name: A shipped recipe or a .yaml file.
        resolved: Show all values, defaults included.
        describe: Say what each key means and which values it takes.

    Example: algorist recipes show quickstart grpo.max_steps=20 --resolved
    """
    from algorist.cli.explain import annotated_yaml, explain
    from algorist.cli.explain import describe as meaning_of
    from algorist.config.load import load_recipe

    loaded = load_recipe(name, overrides or [])
    rows = [r for r in explain(loaded) if resolved or r[2] != "default"]
    loss = loaded.recipe.grpo.loss.name
    page = annotated_yaml(rows, lambda key: meaning_of(key, loss) if describe else "")
    return Resolved([dict(zip(("key", "value", "from"), row, strict=True)) for row in rows], page)
