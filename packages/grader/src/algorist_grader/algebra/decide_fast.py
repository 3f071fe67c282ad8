"""Quick decisions on two expressions: exact rational points prove, floating point points refute, all else is None.

A floating point value is only used to tell expressions apart, only at six digits, and only where no step lost digits;
what it cannot tell apart goes to ``decide_exact``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from algorist_grader.algebra.functions import FUNCTIONS, Unsure
from algorist_grader.algebra.tree import Node, symbols

_MAX_BITS = 20_000


def points(names: frozenset[str], round_: int) -> dict[str, Fraction]:
    """Return one rational value per symbol, the same in every process; odd rounds hold negative values."""
    values = {}
    for name in sorted(names):
        seed = zlib.crc32(f"{name}/{round_}".encode())
        value = Fraction(seed % 1_999_993 + 300_007, 1_000_003)
        value *= max(1, round_ - 8) ** 2  # further rounds lie further out, for functions with steps
        values[name] = -value if (round_ + seed) % 2 and round_ else value
        if name.startswith(("n_", "k_")) or name == "infty":
            values[name] = abs(value)
    return values


MORE_ROUNDS = 24
_STEPS = frozenset({"floor", "ceil", "max", "min", "abs", "sgn", "gcd", "lcm"})


def has_steps(node: Node) -> bool:
    """Say whether a function with steps occurs, which a few points could miss."""
    return _occurs(node, lambda one: len(one) == 3 and one[0] == "fn" and one[1] in _STEPS)


def _occurs(node: Node, holds: Callable[[Node], bool]) -> bool:
    stack: list[object] = [node]
    while stack:
        one = stack.pop()
        if isinstance(one, tuple):
            if holds(one):
                return True
            stack.extend(one)
    return False


def exact(node: Node, at: Mapping[str, Fraction]) -> Fraction:
    """Return the exact value at rational points.

    Raises:
        Unsure: Not rational, too large, or a division by zero.
    """
    kind = node[0]
    if kind == "num":
        return node[1]  # type: ignore[no-any-return]
    if kind == "sym" and node[1] in at and node[1] != "infty":
        return at[node[1]]
    if kind == "add":
        return sum((exact(one, at) for one in node[1]), Fraction(0))
    if kind == "mul":
        value = Fraction(1)
        for one in node[1]:
            value *= exact(one, at)
            if value.numerator.bit_length() > _MAX_BITS:
                raise Unsure
        return value
    if kind == "pow" and node[2][0] == "num" and node[2][1].denominator == 1:
        base, exponent = exact(node[1], at), int(node[2][1])
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) > _MAX_BITS or (not base and exponent < 0):
            raise Unsure
        return base**exponent
    if kind == "fn":
        function = FUNCTIONS.get(node[1])
        if function is not None and function.exact is not None:
            return Fraction(function.exact(*(exact(one, at) for one in node[2])))
    raise Unsure


def approximate(node: Node, at: Mapping[str, complex]) -> complex:
    """Return the value in floating point.

    Raises:
        Unsure: A step lost digits, or left the range of floating point numbers.
        OverflowError: A number is larger than these.
    """
    kind = node[0]
    if kind == "num":
        return _checked(complex(float(node[1]))) if node[1] else complex(0)
    if kind == "sym":
        if node[1] == "infty":
            raise Unsure
        return at[node[1]]
    if kind == "add":
        terms = [approximate(one, at) for one in node[1]]
        value = sum(terms)
        if abs(value) < 1e-6 * max(abs(t) for t in terms):
            raise Unsure
        return _checked(value)
    if kind == "mul":
        value = complex(1)
        for one in node[1]:
            value *= approximate(one, at)
        return _checked(value)
    if kind == "pow":
        base, exponent = approximate(node[1], at), approximate(node[2], at)
        if abs(exponent) > 1e3 or base == 0:
            raise Unsure
        return _checked(_power(base, exponent, node[2]))
    return _checked(_function(node[1], [approximate(one, at) for one in node[2]]))


def _checked(value: complex) -> complex:
    if not 1e-200 < abs(value) < 1e200:
        raise Unsure
    return value


def _function(name: str, values: list[complex]) -> complex:
    function = FUNCTIONS.get(name)
    if function is None or function.fast is None or (abs(values[0]) > 1e3 and not function.any_size):
        raise Unsure
    value = complex(function.fast(*values))
    if abs(value) < 1e-9:  # perhaps the noise of a zero: sin(pi)
        raise Unsure
    return value


def has_real_root(exponent: Node) -> bool:
    """Say whether a negative number has a real power of this exponent: a fraction with an odd denominator."""
    return exponent[0] == "num" and exponent[1].denominator % 2 == 1 and exponent[1].denominator > 1


def _power(base: complex, exponent: complex, written: Node) -> complex:
    if base.imag == 0 and base.real < 0 and has_real_root(written):
        return complex((-1) ** written[1].numerator * (-base.real) ** exponent.real)
    return base**exponent


def outside(value: Any) -> bool:
    """Say whether a value is not real, beyond the noise of floating point."""
    return bool(abs(value.imag) > 1e-9 * abs(value))


def complex_(node: Node) -> bool:
    """Say whether the imaginary unit is written."""
    return _occurs(node, lambda one: one == ("sym", "i"))


def differ(a: Node, b: Node, names: frozenset[str]) -> bool:
    """Say whether floating point values at three points tell the expressions apart; False means: cannot tell.

    A point counts only where both values exist. Where neither is real (``x^{3/2}`` at -1) neither is defined, and a
    difference there counts only if no point is real.
    """
    counted, apart_outside = 0, False
    for round_ in (0, 1, 2) if names else (0,):
        at: dict[str, complex] = {
            name: complex(float(value)) for name, value in points(names, round_).items()
        }
        at |= {"e": complex(math.e), "i": 1j, "pi": complex(math.pi)}
        try:
            left, right = approximate(a, at), approximate(b, at)
        except (Unsure, OverflowError, ZeroDivisionError, ValueError):
            continue
        apart = abs(left - right) > 1e-6 * max(abs(left), abs(right))
        if names and outside(left) and outside(right) and not complex_(a) and not complex_(b):
            apart_outside |= apart
        elif apart:
            return True
        else:
            counted += 1
    return apart_outside and not counted


def _agree(a: Node, b: Node, names: frozenset[str], rounds: range) -> bool:
    points_ = (points(names, round_) for round_ in rounds)
    return all(exact(a, at) == exact(b, at) for at in points_)


def quick(a: Node, b: Node) -> bool | None:
    """Return whether two scalars are equal, or None where only more digits can tell."""
    if a == b:
        return True
    if a[0] == "num" and b[0] == "num":
        return False
    names = symbols(a) | symbols(b)
    if "infty" in names:
        return False if names == {"infty"} and (a[0] == "num" or b[0] == "num") else None
    try:
        if not _agree(a, b, names, range(3 if names else 1)):
            return False
        return not (names and (has_steps(a) or has_steps(b))) or _agree(
            a, b, names, range(3, 3 + MORE_ROUNDS)
        )
    except (Unsure, ZeroDivisionError):
        pass
    return False if differ(a, b, names) else None
