"""``algorist from-trl SCRIPT``: from a training script for TRL, which is read and never run, to a recipe."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from algorist.cli.terminal import Result, View, verb
from algorist.errors import ConfigError

app = typer.Typer(add_completion=False)


class Carried(Result):
    """Files written, and settings not carried over."""

    files: Annotated[list[str], "recipe, code"]
    settings: Annotated[dict[str, Any], "key → value"]
    by_default: Annotated[list[str], "of TRL"]
    left: Annotated[list[str], "not carried over"]
    next: str

    def view(self, width: int) -> View:
        yield f"written: {', '.join(self.files)}"
        if self.left:
            yield "not carried over (also written into the recipe):"
            for line in self.left:
                yield textwrap.fill(line, width, initial_indent="- ", subsequent_indent="  ")
        yield f"Next: {self.next}"


@verb(app)
def from_trl(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.py")],
    to: Annotated[Path | None, typer.Option(metavar="FILE.yaml")] = None,
    as_json: bool = False,
) -> Carried:
    """Write the recipe of a script that builds a GRPOTrainer or SFTTrainer; it is read and never run. Next: algorist preflight.

    Args:
        script: A training script for TRL or Unsloth.
        to: The recipe; SCRIPT.yaml when left out. The script's code that it needs goes beside it.

    Example: algorist from-trl train.py
    """
    from algorist.cli.trl_script import code_beside, read_script

    parsed = read_script(script)
    recipe = to or Path(f"{script.stem}.yaml")
    texts = {recipe: _recipe(parsed)}
    texts |= {recipe.with_name(file): code for file, code in code_beside(parsed).items()}
    if taken := [str(file) for file in texts if file.exists()]:
        raise ConfigError(
            f"{', '.join(taken)}: already there, and nothing was written. Take another name: --to FILE.yaml"
        )
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
    files = [str(file) for file in texts]
    return Carried(
        files=files,
        settings=parsed.settings,
        by_default=sorted(parsed.by_default & set(parsed.settings)),
        left=parsed.left,
        next=f"algorist preflight {recipe}",
    )


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _recipe(script: Any) -> str:
    """Return the recipe's text: what was not carried over as comments, TRL's defaults marked."""
    nested: dict[str, Any] = {}
    for key, value in script.settings.items():
        *path, last = key.split(".")
        section = nested
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    head = [f"# Written by algorist from-trl of {script.path.name}."]
    if script.left:
        head.append("# Not carried over:")
        for line in script.left:
            head += textwrap.wrap(line, 110, initial_indent="# - ", subsequent_indent="#   ")
    defaults = sorted(script.by_default & set(script.settings))
    if defaults:
        text = f"Defaults of TRL and PEFT, which the script leaves as they are: {', '.join(defaults)}"
        head += textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="# ")
    body = yaml.dump(
        {"name": script.path.stem} | nested, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110
    )
    return "\n".join(head) + "\n" + body
