"""Arithmetic without rounding: a sum as text, its value as text."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from algorist.extensions.toolbox.base import Output, ToolLimits, tool

MOST_CHARACTERS, MOST_DIGITS, MOST_DEPTH = 200, 100, 20
"""Longest expression, longest number that is computed, deepest nesting of brackets and signs."""
DECIMALS = 4
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})
CURRENCIES = "$€£"
_CURRENCY = re.compile(rf"[{CURRENCIES}](?=\.?\d)")
_TIMES = re.compile(r"(?<=[\d)])(?:\s+|(?<!(?<![\d.])0))[xX]\s*(?=[-(\d.])")
"""An ``x`` between numbers; ``0x10`` is one number, which no sum has."""
_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")
_OTHER = re.compile(r"[^-+*/%()\d. ]", re.ASCII)


class NotArithmetic(ValueError):
    """The text is not a sum, or its value is not a number of bearable size."""


def value_of(expression: str) -> Fraction:
    """Return the exact value of an expression of ``+ - * / // % ** ( )``, in the spellings that ``plain`` understands.

    Raises:
        NotArithmetic: It is none, divides by zero, or a number in it gets longer than ``MOST_DIGITS`` digits.
    """
    if len(expression) > MOST_CHARACTERS:
        raise NotArithmetic(f"the expression is longer than {MOST_CHARACTERS} characters")
    text = plain(expression)
    if odd := _OTHER.search(text):
        raise NotArithmetic(f"'{text[odd.start() :][:20]}' is not arithmetic")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError, RecursionError):
        raise NotArithmetic(f"'{text[:40]}' is not a whole expression") from None
    return _value(tree, text)


def plain(expression: str) -> str:
    """Return an expression in Python's spelling: ``^ × ÷``, ``x`` between numbers, commas in them and currency signs are understood."""
    text = _CURRENCY.sub("", re.sub(r"(?<=\d),", "", expression.translate(_SPELLINGS)))
    return " ".join(_ZEROS.sub("", _TIMES.sub(" * ", text)).split())


def as_text(value: Fraction) -> str:
    """Return a whole number plainly, another with ``DECIMALS`` decimals at most, a small one with as many significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = value * 10**DECIMALS
    if abs(scaled) < 10 ** (DECIMALS - 1):
        return f"{float(value):.{DECIMALS}g}"
    rounded = round(scaled)
    digits = str(abs(rounded)).rjust(DECIMALS + 1, "0")
    text = f"{digits[:-DECIMALS]}.{digits[-DECIMALS:]}".rstrip("0").rstrip(".")
    return f"-{text}" if rounded < 0 else text


def _value(node: ast.expr, text: str, depth: int = 0) -> Fraction:
    """Return the value of a part of an expression that Python's own parser has read."""
    if depth > MOST_DEPTH:
        raise NotArithmetic(f"it is nested deeper than {MOST_DEPTH} levels")
    if isinstance(node, ast.Constant) and node.value is not ...:
        return _bearable(Fraction(text[node.col_offset : node.end_col_offset]))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, text, depth + 1)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        # Long sums lean to the left: they are no deeper than they look.
        left = _value(node.left, text, depth + (not isinstance(node.left, ast.BinOp)))
        right = _value(node.right, text, depth + 1)
        try:
            return _bearable(Fraction(_OPERATIONS[type(node.op)](left, right)))
        except ZeroDivisionError:
            raise NotArithmetic("division by zero") from None
    raise NotArithmetic(f"'{ast.get_source_segment(text, node)}' is not arithmetic")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator == 2 and abs(exponent) <= 10 and base >= 0:
        root = Fraction(math.isqrt(base.numerator), math.isqrt(base.denominator))
        if root**2 == base:
            return _power(root, 2 * exponent)
    if exponent.denominator != 1:
        raise NotArithmetic("the power is not rational")
    if abs(base) == 1:
        return base ** (int(exponent) % 2)
    if base and abs(exponent) * max(_digits(base), 1) > MOST_DIGITS:
        raise NotArithmetic(f"the number has more than {MOST_DIGITS} digits")
    return base ** int(exponent)


def _digits(value: Fraction) -> int:
    return int(max(value.numerator.bit_length(), value.denominator.bit_length()) * math.log10(2))


def _bearable(value: Fraction) -> Fraction:
    if _digits(value) > MOST_DIGITS:
        raise NotArithmetic(f"the number has more than {MOST_DIGITS} digits")
    return value


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


@tool("calculator")
class Calculator:
    """Exact rational arithmetic in this process: no names, no functions, numbers of bounded size."""

    description = "an arithmetic expression, such as 12 * (3 + 4)"
    inline = True

    def __init__(self, limits: ToolLimits) -> None:
        self.limits = limits

    def check(self) -> None:
        """Nothing is needed."""

    def call(self, request: str, session: Any) -> Output:
        """Return the value of the expression."""
        try:
            return Output(as_text(value_of(request)))
        except NotArithmetic as error:
            return Output(f"Error: {error}", "NotArithmetic")


_TAIL = re.compile(rf"[-+*/%^()×÷·−xX{CURRENCIES}\d.,\s]+\Z")
_OPERATION = re.compile(rf"[\d)]\s*(?:[-+*/%^×÷·−]|[xX]\s*[-(\d.{CURRENCIES}])")


def last_sum(text: str) -> str | None:
    """Return the longest sum that ends a text, with at least one operation between numbers."""
    match = _TAIL.search(text[-120:])
    tail = match.group(0).rpartition("\n")[2] if match else ""
    for start in re.finditer(r"(?<![\d.,])[-(\d.]", tail):
        expression = tail[start.start() :].strip()
        if not _OPERATION.search(expression):
            continue
        try:
            value_of(expression)
        except NotArithmetic:
            continue
        return expression
    return None
