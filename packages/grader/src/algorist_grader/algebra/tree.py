"""Expression trees as plain tuples in one canonical order; rational arithmetic is done while building.

Scalars: ``("num", Fraction)``, ``("sym", name)``, ``("add", terms)``, ``("mul", factors)``, ``("pow", base, exponent)``,
``("fn", name, arguments)``. Around them: ``("tuple", open, close, items)``, ``("set", items)``, ``("list", word, items)`` (word "": ``12,5``, perhaps one number),
``("union", items)``, ``("rel", operators, terms)``, ``("matrix", rows)``, ``("ratio", terms)``, ``("text", words)``,
``("base", digits, base)``, ``("quantity", scalar, unit)``. Equal trees are equal mathematics; the converse does not hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import Any

Node = tuple[Any, ...]

MAX_BITS = 8_000
"""Exact powers with more bits than this stay as powers."""


class Unreadable(Exception):
    """The text is not mathematics that the grammar knows; ``code`` is a reason of ``types.GradeReason``."""

    def __init__(self, message: str, code: str = "unparseable") -> None:
        super().__init__(message)
        self.code = code


ZERO: Node = ("num", Fraction(0))
ONE: Node = ("num", Fraction(1))
MINUS: Node = ("num", Fraction(-1))
HALF: Node = ("num", Fraction(1, 2))
INFINITY: Node = ("sym", "infty")
_SIGNS: frozenset[Node] = frozenset({("sym", "pm"), ("sym", "mp")})
SCALARS = frozenset({"num", "sym", "add", "mul", "pow", "fn"})


def num(value: Fraction | int) -> Node:
    """Return a rational number."""
    return ("num", Fraction(value))


def sym(name: str) -> Node:
    """Return a symbol."""
    return ("sym", name)


def fn(name: str, *arguments: Node) -> Node:
    """Return a function applied to arguments."""
    return ("fn", name, arguments)


def is_scalar(node: Node) -> bool:
    """Return whether the node is a number or an expression, not a set, tuple, relation, text or quantity."""
    return node[0] in SCALARS


def neg(node: Node) -> Node:
    """Return minus the node."""
    return mul([MINUS, node])


def _ordered(nodes: Iterable[Node]) -> tuple[Node, ...]:
    return tuple(sorted(nodes, key=_written))


def _written(node: Node) -> str:
    """Return the node as text; Python writes no integer of more than 4,300 digits in base ten, so those in base 16."""
    try:
        return repr(node)
    except ValueError:
        return _in_base_16(node)


def _in_base_16(node: Any) -> str:
    if isinstance(node, tuple):
        return f"({','.join(_in_base_16(one) for one in node)})"
    return f"{node.numerator:x}/{node.denominator:x}" if isinstance(node, Fraction) else repr(node)


def _coefficient(term: Node) -> tuple[Fraction, Node]:
    """Split a term into its rational coefficient and the rest."""
    if term[0] == "num":
        return term[1], ONE
    if term[0] == "mul" and term[1][0][0] == "num":
        rest = term[1][1:]
        return term[1][0][1], rest[0] if len(rest) == 1 else ("mul", rest)
    return Fraction(1), term


def add(terms: Iterable[Node]) -> Node:
    """Return the sum; like terms are collected."""
    sums: dict[Node, Fraction] = {}
    infinite = count = 0
    for term in terms:
        for one in term[1] if term[0] == "add" else (term,):
            factor, rest = _coefficient(one)
            count += 1
            infinite += rest == INFINITY or (rest[0] == "mul" and INFINITY in rest[1])
            sums[rest] = sums.get(rest, Fraction(0)) + factor
    if infinite and count > 1:
        raise Unreadable("a sum with infinity")
    nonzero = [_scaled(factor, rest) for rest, factor in sums.items() if factor]
    if not nonzero:
        return ZERO
    return nonzero[0] if len(nonzero) == 1 else ("add", _ordered(nonzero))


def _scaled(factor: Fraction, node: Node) -> Node:
    if factor == 1:
        return node
    if node == ONE:
        return ("num", factor)
    if node[0] == "mul":
        return ("mul", (("num", factor), *node[1]))
    return ("mul", (("num", factor), node))


def mul(factors: Iterable[Node]) -> Node:
    """Return the product; equal bases with rational exponents are collected, a number is spread over a sum."""
    number = Fraction(1)
    powers: dict[Node, Fraction] = {}
    roots: dict[Fraction, Fraction] = {}
    others: list[Node] = []
    queue = list(factors)
    while queue:
        one = queue.pop()
        if one[0] == "num":
            number *= one[1]
            _small(number)
        elif one[0] == "mul":
            queue.extend(one[1])
        elif one[0] == "pow" and one[2][0] == "num":
            if one[1][0] == "num" and 0 < one[2][1] < 1 and one[1][1] > 0:
                roots[one[2][1]] = roots.get(one[2][1], Fraction(1)) * one[1][1]
            else:
                powers[one[1]] = powers.get(one[1], Fraction(0)) + one[2][1]
        elif one[0] == "pow":
            others.append(one)
        else:
            powers[one] = powers.get(one, Fraction(0)) + 1
    if INFINITY in powers and (
        abs(number) != 1 or powers[INFINITY] != 1 or others or powers.keys() - _SIGNS != {INFINITY}
    ):
        raise Unreadable("a product with infinity")
    if number == 0:
        return ZERO
    for exponent, base in roots.items():
        reduced = power(("num", base), ("num", exponent))
        scale, rest = _coefficient(reduced)
        number *= scale
        if rest != ONE:
            others.append(rest)
    for base_node, exponent in powers.items():
        if exponent:
            factor = base_node if exponent == 1 else power(base_node, ("num", exponent))
            scale, rest = _coefficient(factor)
            number *= scale
            if rest != ONE:
                others.extend(rest[1] if rest[0] == "mul" else (rest,))
    if not others:
        return ("num", number)
    rest = others[0] if len(others) == 1 else ("mul", _ordered(others))
    if rest[0] == "add" and number != 1:
        return add(_times(number, term) for term in rest[1])
    return _scaled(number, rest)


def _times(number: Fraction, term: Node) -> Node:
    factor, rest = _coefficient(term)
    return _scaled(number * factor, rest)


def _small(number: Fraction) -> None:
    if number.numerator.bit_length() + number.denominator.bit_length() > 4 * MAX_BITS:
        raise Unreadable("a number with too many digits", "too_large")


def divide(top: Node, bottom: Node) -> Node:
    """Return the quotient.

    Raises:
        Unreadable: The divisor is zero.
    """
    return mul([top, power(bottom, MINUS)])


def power(base: Node, exponent: Node) -> Node:
    """Return the power; rational ones are computed, square roots of rationals are reduced."""
    if (base == INFINITY and exponent != ONE) or (exponent == INFINITY and base == ONE):
        raise Unreadable("a power with infinity")
    if exponent == ONE or base == ONE:
        return base
    if exponent == ZERO:
        if base == ZERO:
            raise Unreadable("zero to the power of zero")
        return ONE
    if exponent[0] != "num":
        return ("pow", base, exponent)
    value: Fraction = exponent[1]
    if base[0] == "num":
        return _rational_power(base[1], value)
    if value.denominator == 1:
        if base[0] == "pow" and base[2][0] == "num":
            return power(base[1], ("num", base[2][1] * value))
        if base[0] == "mul" and abs(value) <= 64:
            return mul([power(part, exponent) for part in base[1]])
    return ("pow", base, exponent)


def _rational_power(base: Fraction, exponent: Fraction) -> Node:
    if base == 0:
        if exponent < 0:
            raise Unreadable("division by zero")
        return ZERO
    if exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - (abs(base) == 1)
        if bits * abs(exponent) > MAX_BITS:
            return ("pow", ("num", base), ("num", exponent))
        return ("num", base ** int(exponent))
    whole = exponent.numerator // exponent.denominator
    if whole and base > 0 and abs(whole) <= 64:
        return mul([_rational_power(base, Fraction(whole)), _rational_power(base, exponent - whole)])
    if base < 0 and exponent == Fraction(1, 2):
        return mul([sym("i"), _rational_power(-base, exponent)])
    if base > 0 and 0 < exponent < 1 and exponent.denominator <= 6 and exponent.numerator == 1:
        return _root(base, exponent.denominator)
    return ("pow", ("num", base), ("num", exponent))


@lru_cache(maxsize=4096)
def _root(base: Fraction, degree: int) -> Node:
    """Return the real root of a positive rational as ``outside · inside^(1/degree)`` with a whole, reduced inside."""
    if max(base.numerator.bit_length(), base.denominator.bit_length()) > 64:
        return ("pow", ("num", base), ("num", Fraction(1, degree)))
    inside = base.numerator * base.denominator ** (degree - 1)
    outside, prime = 1, 2
    while prime**degree <= inside and prime < 2_000:
        while inside % prime**degree == 0:
            inside //= prime**degree
            outside *= prime
        prime += 1 if prime == 2 else 2
    whole = round(inside ** (1.0 / degree)) if inside < 2**52 else 0
    if whole and whole**degree == inside:
        outside, inside = outside * whole, 1
    number = ("num", Fraction(outside, base.denominator))
    if inside == 1:
        return number
    rest: Node = ("pow", ("num", Fraction(inside)), ("num", Fraction(1, degree)))
    return rest if number == ONE else ("mul", (number, rest))


def symbols(node: Any) -> frozenset[str]:
    """Return the names of the free symbols, without the constants ``e``, ``i`` and ``pi``."""
    names: set[str] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        if isinstance(one, tuple):
            if len(one) == 2 and one[0] == "sym":
                names.add(one[1])
            else:
                stack.extend(one)
    return frozenset(names - {"e", "i", "pi"})


def substitute(node: Any, name: str, value: Node) -> Any:
    """Return the scalar with a symbol replaced."""
    kind = node[0]
    if kind == "sym":
        return value if node[1] == name else node
    if kind == "num":
        return node
    if kind in ("add", "mul"):
        return (add if kind == "add" else mul)(substitute(one, name, value) for one in node[1])
    if kind == "pow":
        return power(substitute(node[1], name, value), substitute(node[2], name, value))
    return ("fn", node[1], tuple(substitute(one, name, value) for one in node[2]))


def entries(node: Node) -> list[Node]:
    return [as_scalar(entry) for row in node[1] for entry in row]


def matrix(rows: list[tuple[Node, ...]]) -> Node:
    if not rows or len({len(row) for row in rows}) != 1:
        raise Unreadable("rows of different lengths")
    return ("matrix", tuple(rows))


def as_scalar(node: Node) -> Node:
    """Return the node if it is an expression.

    Raises:
        Unreadable: It is something else.
    """
    if node[0] == "maybe":
        return as_scalar(node[1])
    if node[0] == "base":
        raise Unreadable("a numeral with a base inside an expression")
    if not is_scalar(node):
        raise Unreadable(f"a {node[0]} where a number was expected")
    return node


def scaled_container(factor: Node, node: Node) -> Node:
    if node[0] == "matrix":
        return ("matrix", tuple(tuple(mul([factor, as_scalar(e)]) for e in row) for row in node[1]))
    return (node[0], node[1], node[2], tuple(mul([factor, as_scalar(e)]) for e in node[3]))


def multiplied(factors: list[Node]) -> Node:
    containers = [f for f in factors if not is_scalar(f)]
    if not containers:
        if factors[0][0] == "sym" and num(0) in factors:
            raise Unreadable("a function value")  # I(0) is no product
        return mul(factors)
    if len(containers) == 1 and factors[-1][0] in ("matrix", "tuple"):
        return scaled_container(mul([f for f in factors if is_scalar(f)]), containers[0])
    raise Unreadable("a product of things that are not numbers")
