"""Slow decisions on two expressions, in a worker process: values with as many digits as the expressions can hide.

Numbers written with n characters cannot agree with a different number much beyond a few times n digits, except by powers
and exponentials of large size; so the working precision grows with the length of the text and with twice the spread of the
magnitudes that occur, those of numerators and denominators included. Expressions with symbols are compared at several points,
negative ones included.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import mpmath
from mpmath import mp

from algorist_grader.algebra.decide_fast import Points, complex_, has_real_root, outside
from algorist_grader.algebra.functions import FUNCTIONS, Unsure
from algorist_grader.algebra.tree import Node, symbols

_ROUNDS = 5
_MOST_DIGITS = 20_000


class _Evaluation:
    """One evaluation at one precision; remembers how far apart the magnitudes were (in bits).

    What is nothing but noise counts as a small value at first, which asks for more than twice the digits, and as zero then.
    """

    def __init__(self, at: dict[str, Fraction], *, again: bool = False) -> None:
        self.at, self.again = at, again
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

    def _or_zero(self, value: Any, largest: Any) -> Any:
        if abs(value) > mp.mpf(10) ** (15 - mp.dps) * largest:
            return self._seen(value)
        if not self.again:
            self.low = min(self.low, -mp.prec)
            return self._seen(value)
        return mp.mpf(0)

    def value(self, node: Node) -> Any:
        kind = node[0]
        if kind == "num":
            self.high = max(self.high, node[1].numerator.bit_length())
            self.low = min(self.low, -node[1].denominator.bit_length())
            return mp.mpf(node[1].numerator) / node[1].denominator
        if kind == "sym":
            return self._symbol(node[1])
        if kind == "add":
            terms = [self.value(one) for one in node[1]]
            return self._or_zero(mp.fsum(terms), max(map(abs, terms)))
        if kind == "mul":
            return self._seen(mp.fprod(self.value(one) for one in node[1]))
        if kind == "pow":
            return self._power(self.value(node[1]), self.value(node[2]), node[2])
        values = [self.value(one) for one in node[2]]
        if node[1] in ("tanh", "coth"):  # nearer to 1 than any digits show
            self.low = min(self.low, -3 * int(abs(values[0])))
        return self._or_zero(self._function(node[1], values), max(1, *map(abs, values)))

    def _symbol(self, name: str) -> Any:
        if name in ("e", "i", "pi"):
            return {"e": mp.e, "i": mp.j, "pi": mp.pi}[name] * 1
        if name == "infty":
            raise Unsure
        value = self.at[name]
        return mp.mpf(value.numerator) / value.denominator

    def _power(self, base: Any, exponent: Any, written: Node) -> Any:
        if base == 0:
            raise Unsure
        if mp.im(base) == 0 and mp.re(base) < 0 and has_real_root(written):
            return self._seen((-1) ** written[1].numerator * mp.power(-mp.re(base), exponent))
        if abs(exponent) > 1 and abs(exponent) * abs(mp.log(abs(base)) if abs(base) != 1 else 0) > 10**6:
            raise Unsure
        return self._seen(mp.power(base, exponent))

    @staticmethod
    def _function(name: str, values: list[Any]) -> Any:
        function = FUNCTIONS.get(name)
        if function is None or function.digits is None or (abs(values[0]) > 10**6 and not function.any_size):
            raise Unsure
        return function.digits(mp, *values)


def _at_point(a: Node, b: Node, at: dict[str, Fraction], digits: int) -> tuple[bool | None, bool]:
    """Compare at one point, None where a value does not exist there; and say whether neither value is real."""
    for attempt in range(3):
        with mpmath.workdps(digits):
            evaluation = _Evaluation(at, again=attempt > 0)
            try:
                left, right = evaluation.value(a), evaluation.value(b)
            except (Unsure, ArithmeticError, ValueError, TypeError, mpmath.libmp.NoConvergence):
                return None, False
            spread = int((evaluation.high - evaluation.low) * 0.302) * 2 + 1
            if digits < 40 + spread:
                digits = 50 + spread + digits
                if digits > _MOST_DIGITS:
                    return None, False
                continue
            size = max(abs(left), abs(right))
            lost = mp.mpf(10) ** (-(digits - 15))
            same = bool(abs(left - right) <= lost * max(size, mp.mpf(2) ** evaluation.high * lost))
            return same, outside(mp.mpmathify(left)) and outside(mp.mpmathify(right))
    return None, False


def decide(a: Node, b: Node, length: int) -> bool | None:
    """Return whether two scalars are equal; ``length`` is that of the two texts in characters. None: no value exists."""
    names = symbols(a) | symbols(b)
    digits = 50 + 2 * length
    agreed, beyond = 0, []  # beyond: points where neither is defined as a real number
    real = bool(names) and not complex_(a) and not complex_(b)
    points = Points.of(a, b)
    more = points.rounds - 3 if points.rounds > 3 else 0
    for round_ in range(4 * _ROUNDS + more) if names else (0,):
        same, neither_real = _at_point(a, b, points.at(round_), digits)
        if neither_real and real and same is not None:
            beyond.append(same)
            continue
        if same is False:
            return False
        agreed += same is True
        if agreed == _ROUNDS + more or (round_ >= 2 * _ROUNDS + more and not beyond):
            break
    if agreed >= (2 if names else 1):
        return True
    if False in beyond:
        return False
    return True if agreed + len(beyond) >= 2 else None
