"""The checker ``countdown``: an expression that uses the numbers and gives the target."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from operator import add, mul, sub, truediv
from typing import Any

from algorist_grader.checkers import checker
from algorist_grader.numeric import numeric_value

_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: truediv,
}
_SIGNS = str.maketrans({"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-"})
_COMMANDS = re.compile(r"\\(times|cdot|div|left|right)(?![a-zA-Z])")
_ALLOWED = re.compile(r"[0-9+\-*/()\s]+")
_LONGEST = 200


def value_of(expression: str) -> tuple[Fraction | None, Counter[int]]:
    """Return the exact value of an expression of whole numbers with ``+ - * / ( )`` and the numbers it uses; None where it has none.

    The text is parsed, never evaluated: anything but these signs, and more than 200 characters, has no value.
    """
    used: Counter[int] = Counter()

    def walk(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used[node.value] += 1
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -walk(node.operand)
        if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATIONS:
            raise ValueError  # // and ** too
        return _OPERATIONS[type(node.op)](walk(node.left), walk(node.right))

    text = _COMMANDS.sub(lambda sign: {"times": "*", "cdot": "*", "div": "/"}.get(sign[1], ""), expression)
    text = " ".join(text.translate(_SIGNS).replace("$", "").split())
    if len(text) > _LONGEST or not _ALLOWED.fullmatch(text):
        return None, used
    try:
        return walk(ast.parse(text, mode="eval").body), used
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None, used


def _number(value: Any) -> Fraction:
    """Return a number of a row, whose size is bounded."""
    number = numeric_value(str(value))
    if number is None:
        raise ValueError(f"{value!r:.80} is no number")
    return number


@checker("countdown")
def countdown(problem: Mapping[str, Any], answer: str) -> bool:
    """Whether an expression gives ``target`` with each of ``numbers`` (or ``nums``) once; ``exact`` false: at most once.

    ``4 * 6 = 24`` counts as its left side where the right one is the target.
    """
    expression, equals, right = answer.partition("=")
    target = _number(problem["target"])
    if equals and value_of(right)[0] != target:
        return False
    numbers = Counter(_number(n) for n in (problem.get("numbers") or problem["nums"]))
    value, used = value_of(expression)
    return value == target and (used == numbers if problem.get("exact", True) else used <= numbers)
