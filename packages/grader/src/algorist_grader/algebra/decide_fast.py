"""Quick decisions on two expressions: exact rational points prove, floating point points refute, all else is None.

A floating point value is only used to tell expressions apart, only at six digits, and only where no step lost digits;
what it cannot tell apart goes to ``decide_exact``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from algorist_grader.algebra.functions import FUNCTIONS, Unsure
from algorist_grader.algebra.tree import Node, symbols

_MAX_BITS = 20_000


_STEPS = frozenset({"floor", "ceil", "max", "min", "abs", "sgn", "gcd", "lcm"})
_WHOLE_STEPS = frozenset({"floor", "ceil", "gcd", "lcm"})
_TRIGONOMETRY = frozenset({"sin", "cos", "tan", "cot", "sec", "csc"})
_WHOLE_LETTERS = frozenset("nmkjlNMK")
_GRID = (1, 2, 3, 1, 4, 5, 1, 6)
_MANY_ROUNDS = 48


@dataclass(frozen=True)
class Points:
    """Points at which two expressions are compared: one rational value per symbol and round, the same in every process.

    A few general points prove, and odd rounds hold negative values. Functions with steps are looked at many points, half of them
    on a step or whole numbers, halves, thirds, …: ``stepping`` holds the arguments that jump at whole numbers. ``whole`` names the letters that stand for whole numbers: ``n`` in
    ``\\lfloor n/2\\rfloor``, ``(-1)^n``, ``\\sin n\\pi``.
    """

    names: frozenset[str]
    whole: frozenset[str]
    stepping: tuple[Node, ...]
    signed: bool

    @classmethod
    def of(cls, a: Node, b: Node) -> Points:
        """Make the points for two expressions."""
        names = symbols(a) | symbols(b)
        functions = [one for one in _parts(("both", a, b)) if one[0] == "fn" and len(one) == 3]
        steps = [one for one in functions if one[1] in _STEPS]
        whole = any(one[1] in _WHOLE_STEPS for one in steps) or any(map(_alternates, _parts(("both", a, b))))
        letters = frozenset(name for name in names if whole and name.partition("_")[0] in _WHOLE_LETTERS)
        arguments = tuple(dict.fromkeys(one[2][0] for one in steps)) if names else ()
        return cls(names, letters, arguments, any(one[1] not in _WHOLE_STEPS for one in steps))

    @property
    def rounds(self) -> int:
        """Number of points that decide."""
        return 1 if not self.names else _MANY_ROUNDS if self.stepping or self.whole else 3

    def at(self, round_: int) -> dict[str, Fraction]:
        """Return the values of one round; every fourth is where an argument that is linear in a letter is a whole number."""
        values = {name: self._value(name, round_) for name in sorted(self.names)}
        letters = sorted(self.names - self.whole)
        if self.stepping and letters and round_ % 4 == 3:
            turn = round_ // 4
            argument = self.stepping[turn % len(self.stepping)]
            name = letters[turn // len(self.stepping) % len(letters)]
            values[name] = _where(argument, name, values, turn % 7 - 3) or values[name]
        return values

    def _value(self, name: str, round_: int) -> Fraction:
        seed = zlib.crc32(f"{name}/{round_}".encode())
        if name in self.whole:
            whole = round_ + 1 if len(self.whole) == 1 and round_ < 33 else seed % (4 + 6 * round_) + 1
            return Fraction(-whole if self.signed and seed % 2 else whole)
        if self.stepping and round_ > 2 and round_ % 2:
            return Fraction(seed // 7 % 41 - 20, _GRID[round_ // 2 % len(_GRID)])
        value = Fraction(seed % 1_999_993 + 300_007, 1_000_003)
        value *= max(1, round_ - 8) ** 2  # further rounds lie further out, for functions with steps
        positive = not round_ or name.startswith(("n_", "k_")) or name == "infty" or (round_ + seed) % 2 == 0
        return value if positive else -value


def _where(argument: Node, name: str, at: Mapping[str, Fraction], target: int) -> Fraction | None:
    """Return the value of a letter at which a linear argument is ``target``; None where it is not linear."""
    try:
        low, middle, high = (exact(argument, {**at, name: Fraction(value)}) for value in range(3))
    except (Unsure, ZeroDivisionError):
        return None
    slope = middle - low
    return (target - low) / slope if slope and high - middle == slope else None


def _alternates(node: Node) -> bool:
    """Return whether a letter of whole numbers can make a sign of it: ``(-1)^n``, ``\\sin n\\pi``."""
    if node[0] == "pow" and len(node) == 3:
        below_zero = node[1][:1] == ("num",) and node[1][1] < 0
        turns = node[1] == ("sym", "e") and _occurs(node[2], lambda one: one == ("sym", "i"))
        return bool((below_zero or turns) and symbols(node[2]))
    if node[0] != "fn" or len(node) != 3 or node[1] not in _TRIGONOMETRY:
        return False
    return any(_occurs(one, lambda part: part == ("sym", "pi")) and symbols(one) for one in node[2])


def _occurs(node: Node, holds: Callable[[Node], bool]) -> bool:
    return any(map(holds, _parts(node)))


def _parts(node: Node) -> Iterator[Node]:
    """Yield a node and every tuple in it that is not empty."""
    stack: list[object] = [node]
    while stack:
        one = stack.pop()
        if isinstance(one, tuple) and one:
            yield one
            stack.extend(one)


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
    if kind == "pow":
        base, raised = exact(node[1], at), exact(node[2], at)
        if raised.denominator != 1:
            raise Unsure
        exponent = int(raised)
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
    """Return whether a negative number has a real power of this exponent: a fraction with an odd denominator."""
    return exponent[0] == "num" and exponent[1].denominator % 2 == 1 and exponent[1].denominator > 1


def _power(base: complex, exponent: complex, written: Node) -> complex:
    if base.imag == 0 and base.real < 0 and has_real_root(written):
        return complex((-1) ** written[1].numerator * (-base.real) ** exponent.real)
    return base**exponent


def outside(value: Any) -> bool:
    """Return whether a value is not real, beyond the noise of floating point."""
    return bool(abs(value.imag) > 1e-9 * abs(value))


def complex_(node: Node) -> bool:
    """Return whether the imaginary unit is written."""
    return _occurs(node, lambda one: one == ("sym", "i"))


def differ(a: Node, b: Node, points: Points) -> bool:
    """Return whether floating point values at a few points tell the expressions apart; False means: cannot tell.

    A point counts only where both values exist. Where neither is real (``x^{3/2}`` at -1) neither is defined, and a
    difference there counts only if no point is real.
    """
    counted, apart_outside = 0, False
    names = points.names
    for round_ in range(min(points.rounds, 20)):
        at: dict[str, complex] = {name: complex(float(value)) for name, value in points.at(round_).items()}
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


def _agree(a: Node, b: Node, points: Points) -> bool:
    """Return whether exact values agree at every point where both exist; many may lack them only beside steps.

    Raises:
        Unsure: At most of the points they cannot be computed.
    """
    missing = 0
    for round_ in range(points.rounds):
        at = points.at(round_)
        try:
            if exact(a, at) != exact(b, at):
                return False
        except ZeroDivisionError:
            missing += 1
    if missing > points.rounds // 3:
        raise Unsure
    return True


def quick(a: Node, b: Node) -> bool | None:
    """Return whether two scalars are equal, or None where only more digits can tell."""
    if a == b:
        return True
    if a[0] == "num" and b[0] == "num":
        return False
    names = symbols(a) | symbols(b)
    if "infty" in names:
        return False if names == {"infty"} and (a[0] == "num" or b[0] == "num") else None
    points = Points.of(a, b)
    try:
        return _agree(a, b, points)
    except (Unsure, ZeroDivisionError):
        pass
    return False if differ(a, b, points) else None
