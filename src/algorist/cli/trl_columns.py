"""Columns that a script of TRL makes of its rows: read from the function that it gives to ``map``, which is not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from algorist.cli.trl_syntax import Script, called

SAME = ("str", "int", "float", "strip")
"""Calls that leave an answer what it is."""
UNREAD = {"(',', '')", "('$', '')"}
"""Characters whose replacement by nothing the grader does not notice."""


def take_columns(script: Script) -> None:
    """Take the columns of a row's question and answer, and the names by which the rewards ask for the answer.

    A function that does more with them than to copy is left to the reader.
    """
    asked = {name for reward in script.rewards for name in parameters(script, reward)}
    for call in script.calls("map"):
        made = dict(_made(script, call))
        golds = [key for key in made if key in asked and key != "prompt"]
        rest = [
            ast.unparse(value) for key, value in made.items() if key in asked and not _copies(script, value)
        ]
        columns = {"question": _column(_user(made.get("prompt")))}
        if len(golds) == 1:
            columns["answer"] = _column(made[golds[0]])
            if golds[0] != "answer" and columns["answer"]:
                script.answers.append(golds[0])
        known = {key: name for key, name in columns.items() if name}
        for role in ("train", "eval"):
            if script.settings.get(f"data.{role}.name") == "local":
                script.settings |= {f"data.{role}.columns.{key}": name for key, name in known.items()}
        if not made or (golds and not columns.get("answer")):
            script.leave(call, "rows are questions and answers here: name columns with data.train.columns")
        elif rest:
            script.leave(call, f"columns are read as they are, without: {'; '.join(rest)}")
    for call in script.calls("filter"):
        script.leave(call, "all rows are read; data.train.limit and pass_rate choose among them")


def parameters(script: Script, name: str) -> list[str]:
    """Return the names of a function's arguments."""
    found = [node for node in script.tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return [a.arg for node in found for a in (*node.args.args, *node.args.kwonlyargs)]


def under_our_name(script: Script, name: str) -> str:
    """Return code that gives a reward function its answers by the name that they have here; empty where it asks for no other."""
    node = [n for n in script.tree.body if isinstance(n, ast.FunctionDef) and n.name == name][-1]
    theirs = [argument for argument in parameters(script, name) if argument in script.answers]
    if not theirs or "answer" in parameters(script, name):
        return ""
    optional = len(node.args.defaults)
    required = [a.arg for a in node.args.args[: len(node.args.args) - optional]]
    kept = [argument for argument in required if argument not in theirs]
    more = ["**columns"] if node.args.kwarg else []
    given = [f"{argument}=answer" for argument in theirs] + [f"{argument}={argument}" for argument in kept]
    return (
        f"\n\n_{name} = {name}\n\n\ndef {name}({', '.join([*kept, 'answer', *more])}):  # which the script calls {theirs[0]}\n"
        f"    return _{name}({', '.join([*given, *more])})\n"
    )


def _made(script: Script, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yield (column, expression) of what the function of a ``map`` returns, or sets in its row."""
    function: ast.AST | None = call.args[0] if call.args else None
    if isinstance(function, ast.Name):
        defined = [n for n in ast.walk(script.tree) if isinstance(n, ast.FunctionDef)]
        function = next((n for n in defined if n.name == getattr(call.args[0], "id", "")), None)
    if not isinstance(function, (ast.Lambda, ast.FunctionDef)):
        return
    inner = list(ast.walk(function))
    returned: list[Any] = (
        [function.body]
        if isinstance(function, ast.Lambda)
        else [n.value for n in inner if isinstance(n, ast.Return)]
    )
    for row in returned:
        if isinstance(row, ast.Dict):
            pairs = zip(row.keys, row.values, strict=True)
            yield from ((str(key.value), value) for key, value in pairs if isinstance(key, ast.Constant))
    for node in inner:
        if isinstance(node, ast.Assign) and (name := _name(node.targets[0])):
            yield name, node.value


def _user(prompt: ast.expr | None) -> ast.expr | None:
    """Return the content of a chat's message of the user; a prompt that is no chat is the content."""
    if not isinstance(prompt, ast.List):
        return prompt
    for message in reversed(prompt.elts):
        if isinstance(message, ast.Dict):
            keys = [getattr(key, "value", None) for key in message.keys]
            row = dict(zip(keys, message.values, strict=True))
            if getattr(row.get("role"), "value", None) == "user":
                return row.get("content")
    return None


def _copies(script: Script, node: ast.expr, parameter: str = "") -> bool:
    """Tell whether an expression is a column of the row, or a parameter: itself, as a text or number, or its part after ``####``."""
    split = node.value.func if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call) else None
    if isinstance(split, ast.Attribute):  # the adapters read an answer after its #### as well
        marked = ast.unparse(node).endswith((".split('####')[1]", ".split('####')[-1]"))
        return marked and _copies(script, split.value, parameter)
    if not isinstance(node, ast.Call):
        return getattr(node, "id", None) == parameter if parameter else _name(node) is not None
    inner = [node.func.value] if isinstance(node.func, ast.Attribute) else node.args
    same = called(node) in SAME or (
        called(node) == "replace" and f"({', '.join(map(ast.unparse, node.args))})" in UNREAD
    )
    if not same and not parameter:
        same, inner = _returns_argument(script, called(node)), node.args
    return same and len(inner) == 1 and _copies(script, inner[0], parameter)


def _returns_argument(script: Script, name: str) -> bool:
    """Tell whether a function of the script returns its one argument, as ``_copies`` says, or nothing."""
    for function in script.tree.body:
        if isinstance(function, ast.FunctionDef) and function.name == name and len(function.args.args) == 1:
            ends = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
            ends = [end for end in ends if not (isinstance(end, ast.Constant) and end.value is None)]
            parameter = function.args.args[0].arg
            stores = [
                n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            ]
            changed = parameter in {n.id for n in stores}
            return bool(ends) and not changed and all(_copies(script, end, parameter) for end in ends)
    return False


def _column(node: ast.expr | None) -> str | None:
    """Return the only column of the row that an expression reads."""
    if node is None:
        return None
    read = {name for inner in ast.walk(node) if (name := _name(inner))}
    return read.pop() if len(read) == 1 else None


def _name(node: ast.AST) -> str | None:
    """Return the column that ``row["column"]`` reads."""
    name = node.slice if isinstance(node, ast.Subscript) else None
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None
