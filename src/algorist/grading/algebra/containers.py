"""Numbers, matrices and tuples as factors and entries: what may stand where an expression is expected."""

from __future__ import annotations

from algorist.grading.algebra.tree import Node, Unreadable, is_scalar, mul, num


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
    if len(containers) == 1 and containers[0][0] in ("matrix", "tuple"):
        return scaled_container(mul([f for f in factors if is_scalar(f)]), containers[0])
    raise Unreadable("a product of things that are not numbers")
