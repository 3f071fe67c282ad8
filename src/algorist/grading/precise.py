"""Slow decisions on two expressions, in a worker process: values with as many digits as the expressions can hide.

Numbers written with n characters cannot agree with a different number much beyond a few times n digits, except by powers
and exponentials of large size; so the working precision grows with the length of the text and with the spread of the
magnitudes that occur. Expressions with symbols are compared at several points, negative ones included.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import mpmath
from mpmath import mp

from algorist.grading.probe import Unsure, points
from algorist.grading.tree import Node, symbols

_ROUNDS = 5
_MOST_DIGITS = 20_000
_SIMPLE = {
    "sin": mp.sin, "cos": mp.cos, "tan": mp.tan, "cot": mp.cot, "sec": mp.sec, "csc": mp.csc, "arcsin": mp.asin, "arccos": mp.acos,
    "arctan": mp.atan, "arccot": mp.acot, "sinh": mp.sinh, "cosh": mp.cosh, "tanh": mp.tanh, "coth": mp.coth, "ln": mp.ln,
    "factorial": mp.gamma, "floor": mp.floor, "ceil": mp.ceil, "abs": mp.fabs, "re": mp.re, "im": mp.im, "arg": mp.arg, "sgn": mp.sign,
    "double_factorial": mp.fac2,
}  # fmt: skip


class _Evaluation:
    """One evaluation at one precision; remembers how far apart the magnitudes were (in bits)."""

    def __init__(self, at: dict[str, Fraction]) -> None:
        self.at = at
        self.low = 0
        self.high = 0

    def _seen(self, value: Any) -> Any:
        size = abs(value)
        if size and mp.isfinite(size):
            magnitude = int(mp.mag(size))
            if abs(magnitude) > 10**7:
                raise Unsure
            self.low, self.high = min(self.low, magnitude), max(self.high, magnitude)
        elif not mp.isfinite(size):
            raise Unsure
        return value

    def value(self, node: Node) -> Any:
        kind = node[0]
        if kind == "num":
            return self._seen(mp.mpf(node[1].numerator) / node[1].denominator)
        if kind == "sym":
            return self._symbol(node[1])
        if kind == "add":
            return self._seen(mp.fsum(self.value(one) for one in node[1]))
        if kind == "mul":
            return self._seen(mp.fprod(self.value(one) for one in node[1]))
        if kind == "pow":
            return self._power(self.value(node[1]), self.value(node[2]))
        return self._seen(self._function(node[1], [self.value(one) for one in node[2]]))

    def _symbol(self, name: str) -> Any:
        if name in ("e", "i", "pi"):
            return {"e": mp.e, "i": mp.j, "pi": mp.pi}[name] * 1
        if name == "infty":
            raise Unsure
        value = self.at[name]
        return mp.mpf(value.numerator) / value.denominator

    def _power(self, base: Any, exponent: Any) -> Any:
        if base == 0:
            raise Unsure
        if abs(exponent) > 1 and abs(exponent) * abs(mp.log(abs(base)) if abs(base) != 1 else 0) > 10**6:
            raise Unsure
        return self._seen(mp.power(base, exponent))

    def _function(self, name: str, values: list[Any]) -> Any:
        x = values[0]
        if abs(x) > 10**6 and name not in (
            "ln",
            "log",
            "abs",
            "floor",
            "ceil",
            "deg",
            "re",
            "im",
            "sgn",
            "max",
            "min",
            "root",
        ):
            raise Unsure
        if name == "factorial":
            return mp.gamma(x + 1)
        if name == "binomial":
            return mp.binomial(*values)
        if name == "log":
            return mp.ln(x) / mp.ln(mp.sqrt(17))
        if name == "deg":
            return x * mp.pi / 180
        if name == "root":
            index = values[1]
            if mp.im(x) == 0 and x < 0 and index == int(index) and int(index) % 2:
                return -mp.root(-x, int(index))
            return mp.power(x, 1 / index)
        if name in ("max", "min"):
            return max(values) if name == "max" else min(values)
        if name == "determinant":
            size = round(len(values) ** 0.5)
            if size > 12:
                raise Unsure
            return mp.det(mp.matrix([values[i * size : (i + 1) * size] for i in range(size)]))
        if name in _SIMPLE:
            return _SIMPLE[name](x)
        raise Unsure


def _at_point(a: Node, b: Node, at: dict[str, Fraction], digits: int) -> bool | None:
    """Compare at one point; None where a value does not exist there."""
    for _ in range(3):
        with mpmath.workdps(digits):
            evaluation = _Evaluation(at)
            try:
                left, right = evaluation.value(a), evaluation.value(b)
            except (
                Unsure,
                ZeroDivisionError,
                ValueError,
                OverflowError,
                TypeError,
                mpmath.libmp.NoConvergence,
            ):
                return None
            spread = int((evaluation.high - evaluation.low) * 0.302) + 1
            if digits < 40 + spread:
                digits = 50 + spread + digits
                if digits > _MOST_DIGITS:
                    return None
                continue
            size = max(abs(left), abs(right))
            lost = mp.mpf(10) ** (-(digits - 15))
            return bool(abs(left - right) <= lost * max(size, mp.mpf(2) ** evaluation.high * lost))
    return None


def decide(a: Node, b: Node, length: int) -> bool | None:
    """Return whether two scalars are equal; ``length`` is that of the two texts in characters. None: no value exists."""
    names = symbols(a) | symbols(b)
    digits = 50 + 2 * length
    agreed = 0
    for round_ in range(2 * _ROUNDS) if names else (0,):
        same = _at_point(a, b, points(names, round_), digits)
        if same is False:
            return False
        agreed += same is True
        if agreed == _ROUNDS:
            break
    needed = 2 if names else 1
    return True if agreed >= needed else None
