"""Two trees → equal, different, or None (only more digits can tell). Rules for what answers may be written like.

``scalar`` decides on two expressions: ``probe.quick`` in this process, ``precise.decide`` in a worker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from algorist.grading.tree import (
    MINUS,
    ONE,
    Node,
    Unreadable,
    add,
    is_scalar,
    mul,
    neg,
    num,
    power,
    substitute,
    sym,
    symbols,
)
from algorist.grading.units import number_in_words, one_letter_unit

Scalar = Callable[[Node, Node], bool | None]
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_MOST_ITEMS = 40


def canonical(node: Node) -> Node:
    """Return the tree with what does not change an answer taken off: ``x =``, a degree sign, ``±`` spelled out."""
    kind = node[0]
    if kind == "rel":
        return _relation(node)
    if kind == "list":
        return _list(node)
    if kind in ("set", "tuple"):
        inner = tuple(canonical(one) if one[0] not in ("rel",) else one for one in node[-1])
        items = tuple(
            part for one in inner for part in (one[2] if kind == "set" and one[0] == "list" else (one,))
        )
        return (*node[:-1], items)
    if kind == "union":
        return ("union", tuple(canonical(one) for one in node[1]))
    if kind == "text":
        return _text(node[1])
    if kind == "quantity":
        return _quantity(node)
    if is_scalar(node):
        return _signs(_degrees(node))
    return node


def _quantity(node: Node) -> Node:
    inner = canonical(node[1])
    if inner[0] == "list":
        return ("list", ",", tuple(("quantity", one, node[2]) for one in inner[2]))
    return ("quantity", inner, node[2]) if is_scalar(inner) else node


def _text(words: str) -> Node:
    plain = re.sub(r"[^a-z0-9]+", " ", words.lower()).strip()
    value = number_in_words(words)
    if value is not None:
        return num(value)
    if plain in (
        "no solution",
        "no solutions",
        "no real solution",
        "no real solutions",
        "empty set",
        "the empty set",
        "null set",
    ):
        return ("set", ())
    if len(plain) == 1:
        return sym(plain.upper())
    choice = re.fullmatch(r"(?:option|choice|answer) ([a-j])", plain)
    if choice:
        return sym(choice[1].upper())
    return ("text", plain)


def _degrees(node: Node) -> Node:
    """Take the degree sign off ``120°`` and ``90° - x``; inside ``sin 30°`` it stays."""
    if node[0] == "fn" and node[1] == "deg":
        return ("quantity", node[2][0], (Fraction(1), (("degree", 1),)))
    parts = node[1] if node[0] in ("add", "mul") else ()
    if any(part[0] == "fn" and part[1] == "deg" for part in parts):
        bare = [part[2][0] if part[0] == "fn" and part[1] == "deg" else part for part in parts]
        return ("quantity", add(bare) if node[0] == "add" else mul(bare), (Fraction(1), (("degree", 1),)))
    return node


def _signs(node: Node) -> Node:
    """Spell ``a ± b`` out as the list of its two values."""
    if node[0] == "quantity":
        return node
    names = symbols(node)
    if "pm" not in names and "mp" not in names:
        return node
    values = [substitute(substitute(node, "pm", sign), "mp", neg(sign)) for sign in (ONE, MINUS)]
    return ("list", ",", tuple(values))


def _is_name(node: Node) -> bool:
    """Say whether the node is ``x``, ``f(x)`` or words before an equals sign."""
    if node[0] in ("sym", "name"):
        return not (node[0] == "sym" and node[1] in ("e", "i", "pi", "infty"))
    return (
        node[0] == "mul"
        and len(node[1]) == 2
        and all(p[0] in ("sym", "num") for p in node[1])
        and any(p[0] == "sym" and p[1] in "fghpqFGPQST" for p in node[1])
    )


def _relation(node: Node) -> Node:
    operators, terms = node[1], node[2]
    if operators == ("in",):
        return canonical(terms[1])
    if set(operators) == {"="}:
        return _equation(terms)
    if all(o in _FLIPPED for o in operators):
        interval = _interval(operators, terms)
        return interval if interval is not None else node
    return node


def _equation(terms: Sequence[Node]) -> Node:
    if (
        not _is_name(terms[0])
        and len(terms) == 2
        and _is_name(terms[1])
        and terms[0][0] != "name"
        and is_scalar(terms[0])
        and not symbols(terms[1]) & symbols(terms[0])
    ):
        terms = (terms[1], terms[0])
    name = terms[0] if _is_name(terms[0]) else None
    values = [canonical(t) for t in (terms[1:] if name else terms)]
    if name is not None and len(values) == 1:
        return ("equals", name, values[0])
    if len(values) > 1:
        told = [equal(values[0], other, _exact_only) for other in values[1:]]
        constant = not any(symbols(v) for v in values)
        if (constant or name is not None) and False not in told:
            last: Node = values[-1] if all(told) else ("chain", tuple(values))
            return ("equals", name, last) if name else last
    if name is None and len(values) == 2 and all(is_scalar(v) for v in values):
        return ("equation", add([values[0], neg(values[1])]))
    raise Unreadable("a chain of equalities that do not hold", "ambiguous")


def _exact_only(a: Node, b: Node) -> bool | None:
    from algorist.grading.probe import quick

    return quick(a, b)


def _interval(operators: Sequence[str], terms: Sequence[Node]) -> Node | None:
    """Write ``a < x <= b`` or ``x > a`` as the tuple that the interval is; None for other inequalities."""
    infinity = sym("infty")
    if len(terms) == 2:
        left, right = terms
        operator = operators[0]
        if right[0] == "sym" and not _is_variable(left):
            left, right, operator = right, left, _FLIPPED[operator]
        if not _is_variable(left) or not is_scalar(right) or symbols(left) & symbols(right):
            return None
        if operator in ("<", "<="):
            return ("tuple", "(", "]" if "=" in operator else ")", (neg(infinity), right))
        return ("tuple", "[" if "=" in operator else "(", ")", (right, infinity))
    if len(terms) == 3 and _is_variable(terms[1]):
        low, _, high = terms
        first, second = operators
        if first[0] != second[0]:
            return None
        if first[0] == ">":
            low, high, first, second = high, low, second, first
        return ("tuple", "[" if "=" in first else "(", "]" if "=" in second else ")", (low, high))
    return None


def _is_variable(node: Node) -> bool:
    return node[0] == "sym" and node[1] not in ("e", "i", "pi", "infty")


def _list(node: Node) -> Node:
    items: list[Node] = []
    names: list[str] = []
    for one in node[2]:
        told = canonical(one)
        if told[0] == "equals":
            names.append(str(told[1]))
            told = told[2]
        items.extend(told[2] if told[0] == "list" else (told,))
    if len(set(names)) > 1:
        if len(names) != len(items):
            raise Unreadable("a list in which only some values have names")
        return ("named", tuple(sorted(zip(names, items, strict=True), key=lambda pair: pair[0])))
    if (
        node[1] == "or"
        and len(items) > 1
        and all(i[0] in ("tuple", "union") for i in items)
        and all(one[0] == "rel" for one in node[2])
    ):
        return ("union", tuple(items))
    return ("list", node[1], tuple(items)) if len(items) > 1 else items[0]


# -- equality ----------------------------------------------------------------------------------------------------
def _all(told: Sequence[bool | None]) -> bool | None:
    if any(one is False for one in told):
        return False
    return None if any(one is None for one in told) else True


def _pairs(a: Sequence[Node], b: Sequence[Node], scalar: Scalar) -> bool | None:
    if len(a) != len(b):
        return False
    unsure = False
    for one, other in zip(a, b, strict=True):
        told = equal(one, other, scalar)
        if told is False:
            return False
        unsure = unsure or told is None
    return None if unsure else True


def _unordered(a: Sequence[Node], b: Sequence[Node], scalar: Scalar, *, as_set: bool) -> bool | None:
    if max(len(a), len(b)) > _MOST_ITEMS or (not as_set and len(a) != len(b)):
        return False
    left = list(b)
    unsure = False
    for one in a:
        found: int | None = None
        for place, other in enumerate(left):
            told = equal(one, other, scalar)
            if told:
                found = place
                break
            unsure = unsure or told is None
        if found is None:
            return None if unsure else False
        if not as_set:
            left.pop(found)
    if as_set:
        for other in b:
            told_all = [equal(other, one, scalar) for one in a]
            if True not in told_all:
                return None if None in told_all else False
    return True


def equal(a: Node, b: Node, scalar: Scalar) -> bool | None:
    """Return whether two canonical trees are the same answer; None where ``scalar`` could not tell."""
    if a == b:
        return True
    if a[0] == "chain" or b[0] == "chain":
        return _chained(a, b, scalar)
    if a[0] == "equals" or b[0] == "equals":
        return _named_value(a, b, scalar)
    if a[0] == "quantity" or b[0] == "quantity":
        return _quantities(a, b, scalar)
    if is_scalar(a) and is_scalar(b):
        return _scalars(a, b, scalar)
    kinds = {a[0], b[0]}
    if kinds == {"tuple"}:
        return _pairs(a[3], b[3], scalar) if a[1:3] == b[1:3] else False
    if kinds == {"set"}:
        return _unordered(a[1], b[1], scalar, as_set=True)
    if kinds == {"list"}:
        return _unordered(a[2], b[2], scalar, as_set=False)
    if kinds == {"set", "list"}:
        one, other = (a, b) if a[0] == "set" else (b, a)
        return _unordered(one[1], other[2], scalar, as_set=False)
    if kinds == {"set"} | {"text"}:
        return False
    if kinds == {"union"}:
        return _unordered(a[1], b[1], scalar, as_set=True)
    if kinds == {"cap"} or kinds == {"setminus"}:
        return _pairs([canonical(x) for x in a[1]], [canonical(x) for x in b[1]], scalar)
    if kinds == {"named"}:
        return (
            _pairs([v for _, v in a[1]], [v for _, v in b[1]], scalar)
            if [n for n, _ in a[1]] == [n for n, _ in b[1]]
            else False
        )
    if kinds == {"named", "tuple"}:
        return _coordinates(a, b, scalar)
    if kinds == {"matrix"}:
        return _pairs(
            [("tuple", "(", ")", row) for row in a[1]], [("tuple", "(", ")", row) for row in b[1]], scalar
        )
    if kinds == {"matrix", "tuple"}:
        return _vector(a, b, scalar)
    return _others(a, b, scalar)


def _others(a: Node, b: Node, scalar: Scalar) -> bool | None:
    kinds = {a[0], b[0]}
    if kinds == {"ratio"}:
        return _ratios(a[1], b[1], scalar)
    if "ratio" in kinds:
        ratio, other = (a, b) if a[0] == "ratio" else (b, a)
        if (
            len(ratio[1]) == 2
            and is_scalar(other)
            and all(is_scalar(t) for t in ratio[1])
            and not _clock(ratio[1])
        ):
            return (
                equal(mul([ratio[1][0], power(ratio[1][1], MINUS)]), other, scalar)
                if ratio[1][1] != num(0)
                else False
            )
        return False
    if kinds == {"equation"}:
        return _equations(a[1], b[1], scalar)
    if kinds == {"rel"}:
        return _inequalities(a, b, scalar)
    if kinds == {"text", "sym"}:
        text, symbol = (a, b) if a[0] == "text" else (b, a)
        return bool(text[1] == symbol[1].lower())
    if kinds == {"set", "list"} or "list" in kinds:
        return False
    return False


def _scalars(a: Node, b: Node, scalar: Scalar) -> bool | None:
    if a[0] == b[0] == "sym" and len(a[1]) == len(b[1]) == 1 and a[1].upper() == b[1].upper():
        return a[1].upper() in "ABCDEFGHJ" or a[1] == b[1]
    return scalar(a, b)


def _named_value(a: Node, b: Node, scalar: Scalar) -> bool | None:
    """``x = 5`` is ``5``, and ``x = 5``, but not ``y = 5``; as equations ``y = 2x`` is ``2x - y = 0``."""
    if a[0] == "equals" and b[0] == "equals":
        if a[1] == b[1]:
            return equal(a[2], b[2], scalar)
        if {a[1][0], b[1][0]} == {"mul", "sym"} and ("sym", "y") in (a[1], b[1]):  # y = … and f(x) = …
            return equal(a[2], b[2], scalar)
        if a[1] and b[1] and a[1][0] == b[1][0] == "name":
            return False
        if "name" in (a[1][0], b[1][0]) if a[1] and b[1] else True:
            return equal(a[2], b[2], scalar)
        return (
            _equations(_difference(a), _difference(b), scalar)
            if is_scalar(a[2]) and is_scalar(b[2])
            else False
        )
    named, other = (a, b) if a[0] == "equals" else (b, a)
    if other[0] == "equation":
        return (
            _equations(_difference(named), other[1], scalar)
            if is_scalar(named[2]) and is_scalar(named[1])
            else False
        )
    return equal(named[2], other, scalar)


def _chained(a: Node, b: Node, scalar: Scalar) -> bool | None:
    """A chain of equal values says its last one, if its parts are equal indeed."""
    told: list[bool | None] = []
    for node in (a, b):
        if node[0] == "chain":
            told += [equal(node[1][0], other, scalar) for other in node[1][1:]]
    left, right = (n[1][-1] if n[0] == "chain" else n for n in (a, b))
    return _all([*told, equal(left, right, scalar)])


def _difference(node: Node) -> Node:
    return add([node[1], neg(node[2])])


def _equations(a: Node, b: Node, scalar: Scalar) -> bool | None:
    """Two equations ``a = 0`` and ``b = 0`` are the same if ``a`` is a constant times ``b``."""
    names = symbols(a) | symbols(b)
    if symbols(a) != symbols(b) or not names:
        return scalar(a, b)
    first = {name: num(Fraction(3 + 2 * place, 7)) for place, name in enumerate(sorted(names))}
    at_a, at_b = a, b
    for name, value in first.items():
        at_a, at_b = substitute(at_a, name, value), substitute(at_b, name, value)
    if num(0) in (at_a, at_b):
        return scalar(at_a, at_b) and None
    return scalar(mul([a, at_b]), mul([b, at_a]))


def _inequalities(a: Node, b: Node, scalar: Scalar) -> bool | None:
    if len(a[1]) != 1 or len(b[1]) != 1:
        return (
            _pairs(a[2], b[2], scalar)
            if a[1] == b[1] and all(is_scalar(t) for t in (*a[2], *b[2]))
            else False
        )

    def upward(node: Node) -> tuple[str, Node]:
        operator, (left, right) = node[1][0], node[2]
        if not (is_scalar(left) and is_scalar(right)):
            raise Unreadable("an inequality of things that are not numbers")
        if operator in (">", ">="):
            operator, left, right = _FLIPPED[operator], right, left
        return operator, add([left, neg(right)])

    (one, left), (other, right) = upward(a), upward(b)
    if one != other:
        return False
    return scalar(left, right) if one not in ("!=", "~") else _equations(left, right, scalar)


def _quantities(a: Node, b: Node, scalar: Scalar) -> bool | None:
    """Units must agree where both have one; a missing unit is forgiven, a wrong one is not. ``50%`` is 50 and 0.5."""
    if a[0] == b[0] == "quantity":
        (left, one), (right, other) = a[2], b[2]
        if one == other:
            scaled = [mul([num(f), n[1]]) for f, n in ((left, a), (right, b))]
            return scalar(scaled[0], scaled[1])
        angles = {(("degree", 1),), (("radian", 1),)}
        if {one, other} == angles:
            return scalar(
                *(
                    mul([n[1], sym("pi"), num(Fraction(1, 180))]) if u == (("degree", 1),) else n[1]
                    for n, u in ((a, one), (b, other))
                )
            )
        return False
    measured, bare = (a, b) if a[0] == "quantity" else (b, a)
    if bare[0] == "mul" and len(bare[1]) == 2 and bare[1][0][0] == "num" and bare[1][1][0] == "sym":
        unit = one_letter_unit(bare[1][1][1])
        if unit is not None:  # "3 m" beside "300 cm" is three metres
            return equal(measured, ("quantity", bare[1][0], unit), scalar)
    if bare[0] in ("list", "tuple", "set"):
        return False
    if not is_scalar(bare):
        return False
    told = scalar(measured[1], bare)
    if told is not True and measured[2][1] == (("percent", 1),):
        part = scalar(mul([num(Fraction(1, 100)), measured[1]]), bare)
        return part if part is not False else told
    return told


def _clock(terms: Sequence[Node]) -> bool:
    """Say whether ``a:b`` can be a time of day."""
    return (
        len(terms) == 2
        and all(t[0] == "num" and t[1].denominator == 1 for t in terms)
        and (10 <= terms[1][1] < 60 or terms[1][1] == 0)
        and terms[0][1] <= 24
    )


def _ratios(a: Sequence[Node], b: Sequence[Node], scalar: Scalar) -> bool | None:
    if len(a) != len(b) or not all(is_scalar(t) for t in (*a, *b)):
        return False
    if _clock(a) or _clock(b):
        return _pairs(a, b, scalar)
    return _all([scalar(mul([a[0], y]), mul([b[0], x])) for x, y in zip(a[1:], b[1:], strict=True)])


def _coordinates(a: Node, b: Node, scalar: Scalar) -> bool | None:
    named, point = (a, b) if a[0] == "named" else (b, a)
    if point[1:3] != ("(", ")"):
        return False
    return _pairs([value for _, value in named[1]], point[3], scalar)


def _vector(a: Node, b: Node, scalar: Scalar) -> bool | None:
    matrix, point = (a, b) if a[0] == "matrix" else (b, a)
    rows = matrix[1]
    if point[1:3] not in (("(", ")"), ("[", "]")):
        return False
    if len(rows) == 1:
        return _pairs(rows[0], point[3], scalar)
    return _pairs([row[0] for row in rows], point[3], scalar) if len(rows[0]) == 1 else False
