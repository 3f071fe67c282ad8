"""The syntax tree of a script: values that are known without running it, calls by name, and what is taken of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from algorist.store.safe_text import one_line


@dataclass
class Script:
    """Contents of a script: overrides of a recipe by key, the source of its reward functions, and what is left to the reader."""

    path: Path
    tree: ast.Module
    settings: dict[str, Any] = field(default_factory=dict)
    by_default: set[str] = field(default_factory=set)
    """Keys whose values are TRL's defaults."""
    rewards: list[str] = field(default_factory=list)
    """Functions of the script that are rewards."""
    environment_classes: list[str] = field(default_factory=list)
    """Classes of the script that are environments."""
    answers: list[str] = field(default_factory=list)
    """Names by which the rewards ask for the answer."""
    paying: dict[str, float] = field(default_factory=dict)
    """Functions that pay what environments know → weight."""
    left: list[str] = field(default_factory=list)
    """Code that could not be carried over: line, source, reason."""

    def leave(self, node: ast.AST, why: str) -> None:
        """Record code that could not be carried over."""
        text = one_line(ast.unparse(node), 70)
        line = f"line {getattr(node, 'lineno', '?')}: {text}: {why}"
        if line not in self.left:
            self.left.append(line)

    def assigned(self, before: float = float("inf")) -> dict[str, ast.expr]:
        """Return name → the last value that it is given anywhere in the script, or before a line."""
        values: dict[str, ast.expr] = {}
        assigns: list[tuple[list[ast.expr], ast.expr]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                assigns.append((node.targets, node.value))
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                assigns.append(([node.target], node.value))
        if before < float("inf"):
            assigns = sorted((a for a in assigns if a[1].lineno < before), key=lambda a: a[1].lineno)
        for targets, value in assigns:
            for target in targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                values |= {name.id: value for name in names if isinstance(name, ast.Name)}
        return values

    def gives(self, made: ast.expr) -> bool:
        """Tell whether the script does anything with a value but to name, change and print it."""
        names = {name for name, value in self.assigned().items() if value is made}
        # config.r = 8 changes it
        owners = [node.value for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)]
        aside = {*owners, *(inner for call in self.calls("print") for inner in ast.walk(call))}
        loads = [n for n in ast.walk(self.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        return not names or any(node.id in names for node in loads if node not in aside)

    def value(self, node: ast.expr | None) -> Any:
        """Evaluate an expression without running the script: a literal, or a name or sum of such.

        Raises:
            ValueError: It is known only when the script runs.
        """
        try:
            return self._value(node)
        except (
            TypeError,
            SyntaxError,
            MemoryError,
            RecursionError,
        ) as error:  # of literal_eval, or ``x = x.strip()``
            raise ValueError from error

    def _value(self, node: ast.expr | None) -> Any:
        if isinstance(node, ast.Name) and node.id in self.assigned():
            return self._value(self.assigned()[node.id])
        if isinstance(node, ast.JoinedStr) or node is None:
            raise ValueError
        if isinstance(node, ast.Call) and called(node) in ("strip", "dedent") and not node.keywords:
            of_text = (
                isinstance(node.func, ast.Attribute) and not node.args
            )  # TEXT.strip(), textwrap.dedent(TEXT)
            inner = [node.func.value] if isinstance(node.func, ast.Attribute) and of_text else node.args
            return str(self._value(next(iter(inner), None))).strip()
        return ast.literal_eval(node)

    def sometimes(self) -> set[ast.AST]:
        """Return the code that a run need not come to, or comes to more than once: below conditions and loops."""
        blocks = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, (ast.For, ast.While, ast.Try, ast.IfExp))
            or (isinstance(node, ast.If) and "__name__" not in ast.unparse(node.test))
        ]
        return {inner for block in blocks for inner in ast.walk(block)}

    def calls(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions by the last part of their names, in the order of the script."""
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and called(node) in names]
        return sorted(calls, key=lambda call: call.lineno)


def called(node: ast.expr) -> str:
    """Return the last part of a called function's name."""
    func = node.func if isinstance(node, ast.Call) else node
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def words(calls: Iterable[ast.Call], name: str) -> list[ast.expr]:
    """Return the values of a keyword in calls."""
    return [word.value for call in calls for word in call.keywords if word.arg == name]
