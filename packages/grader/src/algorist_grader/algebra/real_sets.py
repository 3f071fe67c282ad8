"""Sets of real numbers in one form: ``\\mathbb{R}\\setminus\\{3\\}``, ``x\\ne3`` and ``(-\\infty,3)\\cup(3,\\infty)`` are one set.

A set is a sorted list of cuts (value, side): side 0 cuts just before the value, side 1 just after it; what lies between the
first and the second cut, the third and the fourth, … belongs to the set.
"""

from __future__ import annotations

import math

from algorist_grader.algebra.decide_fast import approximate
from algorist_grader.algebra.functions import Unsure
from algorist_grader.algebra.tree import Node, is_scalar, neg, sym, symbols

Cut = tuple[float, int]
_INFINITY = sym("infty")
_ALL: list[Cut] = [(-math.inf, 1), (math.inf, 0)]
KINDS = frozenset({"union", "setminus", "cap", "set_named"})


class RealSets:
    """Reads sets of reals; remembers which node each value came from. What it cannot read is None."""

    def __init__(self) -> None:
        self.nodes: dict[float, Node] = {}

    def cuts(self, node: Node) -> list[Cut] | None:
        """Return the cuts of a set, or None where it is no set of reals with known ends."""
        kind = node[0]
        if kind == "set_named":
            return _ALL if node[1] == "R" else None
        if kind == "tuple" and len(node[3]) == 2:
            low, high = (self._value(end) for end in node[3])
            if low is None or high is None or not low < high:
                return None
            return [(low, int(node[1] == "(")), (high, int(node[2] == "]"))]
        if kind == "set":
            return self._points(node[1])
        if kind in ("union", "cap", "setminus"):
            parts = [self.cuts(one) for one in node[1]]
            if kind == "union":
                return _union(parts)
            rest = [parts[0], *(_outside(p) for p in parts[1:])] if kind == "setminus" else parts
            return _outside(_union([_outside(p) for p in rest]))
        return None

    def _points(self, items: tuple[Node, ...]) -> list[Cut] | None:
        values = [self._value(item) for item in items]
        if any(v is None or math.isinf(v) for v in values):
            return None
        return _union([[(v, 0), (v, 1)] for v in values if v is not None])

    def _value(self, node: Node) -> float | None:
        if node == _INFINITY:
            return math.inf
        if node == neg(_INFINITY):
            return -math.inf
        if not is_scalar(node) or symbols(node):
            return None
        try:
            value = approximate(node, {"e": math.e, "pi": math.pi, "i": 1j})
        except (Unsure, ArithmeticError, ValueError):
            if node[0] != "num" or node[1] != 0:
                return None
            value = complex(0)
        if abs(value.imag) > 1e-12 * abs(value):
            return None
        if self.nodes.setdefault(value.real, node) != node:
            return None  # two ends that floating point cannot tell apart
        return value.real


def _union(parts: list[list[Cut] | None]) -> list[Cut] | None:
    spans: list[tuple[Cut, Cut]] = []
    for part in parts:
        if part is None:
            return None
        spans += zip(part[::2], part[1::2], strict=True)
    cuts: list[Cut] = []
    for start, end in sorted(spans):
        if cuts and start <= cuts[-1]:
            cuts[-1] = max(cuts[-1], end)
        else:
            cuts += [start, end]
    return cuts


def _outside(cuts: list[Cut] | None) -> list[Cut] | None:
    if cuts is None:
        return None
    if not cuts:
        return list(_ALL)
    inner = cuts[1:] if cuts[0] == _ALL[0] else [_ALL[0], *cuts]
    return inner[:-1] if inner[-1] == _ALL[1] else [*inner, _ALL[1]]
