"""``algorist from-trl SCRIPT``: from a training script for TRL, which is read and never run, to a recipe."""

from __future__ import annotations

import ast
import builtins
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from algorist.cli.terminal import Result, View, verb
from algorist.errors import ConfigError

if TYPE_CHECKING:
    from algorist.cli.trl_syntax import Script

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
    from algorist.cli.trl_script import read_script

    parsed = read_script(script)
    recipe = to or Path(f"{script.stem}.yaml")
    texts = {recipe: _recipe(parsed)}
    texts |= {recipe.with_name(file): code for file, code in _code_beside(parsed).items()}
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


def _recipe(script: Script) -> str:
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


def _code_beside(script: Script) -> dict[str, str]:
    """Return the files of code that belong to the recipe: name → text."""
    from algorist.cli.trl_columns import under_our_name
    from algorist.cli.trl_script import environments_file, rewards_file

    files = {}
    if script.rewards:
        file = rewards_file(script.path)
        wrapped = "".join(under_our_name(script, name) for name in script.rewards)
        files[file] = _source_of(script, "Reward functions", script.rewards, file) + wrapped
    if script.environment_classes:
        file = environments_file(script.path)
        text = _source_of(script, "Environments", [*script.environment_classes, *script.paying], file)
        if script.paying:
            sums = " + ".join(f"{w:g} * ({name}([self])[0] or 0)" for name, w in script.paying.items())
            text += f"\n\ndef get_reward(self):\n    return {sums}\n\n\n"
            text += "".join(f"{name}.get_reward = get_reward\n" for name in script.environment_classes)
        files[file] = text
    return files


def _source_of(script: Script, title: str, members: Iterable[str], file: str) -> str:
    """Return members of the script with what they use: imports, constants, other functions and classes."""
    from algorist.cli.trl_syntax import called

    text = script.path.read_text(encoding="utf-8")
    defined: dict[str, list[ast.stmt]] = {}
    for node in script.tree.body:
        for name in _names(node):
            defined.setdefault(name, []).append(node)
    needed: dict[int, ast.stmt] = {}
    names, seen = list(members), set(dir(builtins))
    while names:
        name = names.pop()
        if name in seen or name not in defined:
            continue
        seen.add(name)
        for node in defined[name]:  # SCALE = 2, and later SCALE = SCALE * 2
            if isinstance(node, (ast.If, ast.Try)) and any(isinstance(n, ast.Expr) for n in ast.walk(node)):
                script.leave(node, f"defines {name}, but does more: not in {file}")
                continue
            needed[node.lineno] = node
            names += [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
            if not isinstance(node, DEFINITIONS) and any(
                called(n) not in ("", "compile") for n in ast.walk(node) if isinstance(n, ast.Call)
            ):
                script.leave(node, f"runs whenever {file} is imported, once a process")
    parts = [ast.get_source_segment(text, node, padded=True) or "" for _, node in sorted(needed.items())]
    decorated = [  # ``get_source_segment`` leaves decorators out
        "".join(f"@{ast.unparse(d)}\n" for d in getattr(node, "decorator_list", ()))
        for _, node in sorted(needed.items())
    ]
    head = f'"""{title} of {script.path.name}, taken over by algorist from-trl."""\n\n'
    return head + "\n\n".join(map("".join, zip(decorated, parts, strict=True))) + "\n"


DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def _names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement defines, below a condition or ``try`` too; none of what is for the main program alone."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        inner = (n for target in targets for n in ast.walk(target))
        yield from (n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    elif isinstance(node, ast.Try) or (isinstance(node, ast.If) and "__name__" not in ast.unparse(node.test)):
        for part in (
            node.body,
            node.orelse,
            getattr(node, "finalbody", []),
            *(h.body for h in getattr(node, "handlers", [])),
        ):
            yield from (name for statement in part for name in _names(statement))
