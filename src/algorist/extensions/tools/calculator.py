"""Arithmetic without rounding: a sum as text, its value as text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from algorist.extensions.tools.base import Limits, Output, tool

MOST_CHARACTERS, MOST_DIGITS, MOST_DEPTH = 200, 100, 20
"""Longest expression, longest number that is computed, deepest nesting of brackets and signs."""
DECIMALS = 4
_TOKEN = re.compile(r"\s*(?:(\d[\d,]*\.?\d*|\.\d+)|(\*\*|//|[-+*/%^()×÷·−]))")
_SPELLINGS = {"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"}
_LEVELS = (("+", "-"), ("*", "/", "//", "%"))


class NotArithmetic(ValueError):
    """The text is not a sum, or its value is not a number of bearable size."""


def value_of(expression: str) -> Fraction:
    """Return the exact value of an expression of ``+ - * / // % ** ( )``; ``^ × ÷`` and commas in numbers are understood.

    Raises:
        NotArithmetic: It is none, divides by zero, or a number in it gets longer than ``MOST_DIGITS`` digits.
    """
    return _Reader(expression).value()


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


class _Reader:
    """Reads an expression by precedence, left to right."""

    def __init__(self, expression: str) -> None:
        if len(expression) > MOST_CHARACTERS:
            raise NotArithmetic(f"the expression is longer than {MOST_CHARACTERS} characters")
        self.tokens: list[str] = []
        place, text = 0, expression.strip()
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None:
                raise NotArithmetic(f"'{text[place:].strip()[:20]}' is not arithmetic")
            number, sign = match.groups()
            self.tokens.append(number.replace(",", "") if number else _SPELLINGS.get(sign, sign))
            place = match.end()
        self.at, self.depth = 0, 0

    def value(self) -> Fraction:
        value = self._level(0)
        if self.at < len(self.tokens):
            raise NotArithmetic(f"'{self.tokens[self.at]}' is out of place")
        return value

    def _next(self, *signs: str) -> str | None:
        if self.at < len(self.tokens) and self.tokens[self.at] in signs:
            self.at += 1
            return self.tokens[self.at - 1]
        return None

    def _level(self, level: int) -> Fraction:
        if level == len(_LEVELS):
            return self._signed()
        value = self._level(level + 1)
        while sign := self._next(*_LEVELS[level]):
            value = _checked(_OPERATIONS[sign], value, self._level(level + 1))
        return value

    def _signed(self) -> Fraction:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise NotArithmetic(f"it is nested deeper than {MOST_DEPTH} levels")
        sign = self._next("-", "+")
        value = self._signed() if sign else self._power()
        self.depth -= 1
        return -value if sign == "-" else value

    def _power(self) -> Fraction:
        value = self._number()
        return _checked(_power, value, self._signed()) if self._next("**") else value

    def _number(self) -> Fraction:
        if self._next("("):
            value = self._level(0)
            if not self._next(")"):
                raise NotArithmetic("a bracket is not closed")
            return value
        if self.at == len(self.tokens) or not self.tokens[self.at].strip(".")[:1].isdigit():
            raise NotArithmetic("a number is missing")
        self.at += 1
        return _checked(lambda a, b: a, Fraction(self.tokens[self.at - 1]), Fraction(0))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        root = _root(base, exponent)
        if root is None:
            raise NotArithmetic("the power is not rational")
        return root
    digits = abs(exponent) * max(_digits(base), 1)
    if digits > MOST_DIGITS and abs(base) != 1 and base:
        raise NotArithmetic(f"the number has more than {MOST_DIGITS} digits")
    return base ** (int(exponent) % 2 if abs(base) == 1 else int(exponent))


def _root(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Return ``base ** exponent`` for halves, where the square root is exact."""
    if exponent.denominator != 2 or base < 0 or abs(exponent) > 10:
        return None
    above, below = math.isqrt(base.numerator), math.isqrt(base.denominator)
    if above**2 != base.numerator or below**2 != base.denominator:
        return None
    return _checked(_power, Fraction(above, below), Fraction(exponent.numerator))


def _digits(value: Fraction) -> int:
    return int(max(value.numerator.bit_length(), value.denominator.bit_length()) * math.log10(2))


def _checked(operation: Callable[[Fraction, Fraction], Any], left: Fraction, right: Fraction) -> Fraction:
    try:
        value = Fraction(operation(left, right))
    except ZeroDivisionError:
        raise NotArithmetic("division by zero") from None
    if _digits(value) > MOST_DIGITS:
        raise NotArithmetic(f"the number has more than {MOST_DIGITS} digits")
    return value


_OPERATIONS: dict[str, Callable[[Fraction, Fraction], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}


@tool("calculator")
class Calculator:
    """Exact rational arithmetic in this process: no names, no functions, numbers of bounded size."""

    description = "an arithmetic expression, such as 12 * (3 + 4)"
    inline = True

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def check(self) -> None:
        """Nothing is needed."""

    def call(self, request: str, session: Any) -> Output:
        """Return the value of the expression."""
        try:
            return Output(as_text(value_of(request)))
        except NotArithmetic as error:
            return Output(f"Error: {error}", "NotArithmetic")
