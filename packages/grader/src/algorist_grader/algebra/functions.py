"""Every function an answer may hold: name → its value over the rationals, in floating point, and with any number of digits.

The third column gets ``mpmath``'s context, so that only a worker process imports it. None: this way cannot tell.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

LOG_BASE_SQUARED = 17
"""``log`` without a base gets the base √17: none of the usual ones, so that ``log`` is neither ``ln`` nor ``lg``."""


class Unsure(Exception):
    """This way of computing cannot tell."""


class Function(NamedTuple):
    """One function computed in three ways, and whether its argument may be large."""

    exact: Callable[..., Fraction | int] | None
    fast: Callable[..., complex] | None
    digits: Callable[..., Any] | None
    any_size: bool = False


def _whole(function: Callable[..., int]) -> Callable[..., int]:
    """Limit a function of integers to sizes that cost nothing."""

    def limited(*values: Fraction) -> int:
        if any(v.denominator != 1 or not 0 <= v <= 400 for v in values):
            raise Unsure
        return function(*(int(v) for v in values))

    return limited


def _determinant(mp: Any, *values: Any) -> Any:
    size = math.isqrt(len(values))
    if size > 12:
        raise Unsure
    return mp.det(mp.matrix([values[i * size : (i + 1) * size] for i in range(size)]))


def _fast_log(x: complex) -> complex:
    return cmath.log(x) / (math.log(LOG_BASE_SQUARED) / 2)


def _named(name: str, exact: Any = None, *, fast: str = "", any_size: bool = False) -> Function:
    """Return the function that mpmath calls ``name``, and cmath ``fast``."""
    return Function(exact, getattr(cmath, fast, None), lambda mp, *x: getattr(mp, name)(*x), any_size)


def _step(name: str, step: Callable[[Any], int]) -> Function:
    """Return floor or ceiling; beside a whole number only exact values can tell, and many digits that are the whole number."""

    def fast(x: complex) -> complex:
        if x.imag or abs(x.real - round(x.real)) <= 1e-6 * max(1.0, abs(x.real)):
            raise Unsure
        return complex(step(x.real))

    def digits(mp: Any, x: Any) -> Any:
        nearest = mp.nint(mp.re(x))
        near = abs(x - nearest) <= mp.mpf(10) ** (15 - mp.dps) * max(1, abs(x))
        return nearest if near else getattr(mp, name)(x)

    return Function(step, fast, digits, any_size=True)


def _any_function(library: Any, x: Any) -> Any:
    """Stand for a function that is not known: no law holds for its values at different places."""
    return library.exp(x * 5 / 16) + library.sin(x + 0.375)


FUNCTIONS: dict[str, Function] = {
    **{name: _named(name, fast=name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "coth")},
    **{f"arc{name}": _named(f"a{name}", fast=f"a{name}") for name in ("sin", "cos", "tan", "cot")},
    "cot": Function(None, lambda x: 1 / cmath.tan(x), lambda mp, x: mp.cot(x)),
    "sec": Function(None, lambda x: 1 / cmath.cos(x), lambda mp, x: mp.sec(x)),
    "csc": Function(None, lambda x: 1 / cmath.sin(x), lambda mp, x: mp.csc(x)),
    "ln": _named("ln", fast="log", any_size=True),
    "log": Function(None, _fast_log, lambda mp, x: mp.ln(x) * 2 / mp.ln(LOG_BASE_SQUARED), any_size=True),
    "deg": Function(None, lambda x: x * math.pi / 180, lambda mp, x: x * mp.pi / 180, any_size=True),
    "abs": Function(abs, abs, lambda mp, x: mp.fabs(x), any_size=True),
    **{name: _step(name, step) for name, step in (("floor", math.floor), ("ceil", math.ceil))},
    "max": Function(lambda *v: max(v), None, lambda mp, *v: max(v), any_size=True),
    "min": Function(lambda *v: min(v), None, lambda mp, *v: min(v), any_size=True),
    **{name: _named(name, any_size=True) for name in ("re", "im")},
    "arg": _named("arg"),
    "sgn": _named("sign", any_size=True),
    "factorial": Function(_whole(math.factorial), None, lambda mp, x: mp.gamma(x + 1)),
    "double_factorial": _named("fac2"),
    "binomial": _named("binomial", _whole(math.comb)),
    "gcd": Function(_whole(math.gcd), None, None),
    "lcm": Function(_whole(math.lcm), None, None),
    "determinant": Function(None, None, _determinant),
    "f": Function(None, lambda x: _any_function(cmath, x), _any_function),
}
"""``prime`` and ``det`` are read but have no value: they are only compared as they are written."""
