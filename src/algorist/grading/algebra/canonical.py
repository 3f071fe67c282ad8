"""The tree with what does not change an answer taken off: ``x =``, a degree sign, ``±`` spelled out, inequalities as intervals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from algorist.grading.algebra.compare import FLIPPED, equal
from algorist.grading.algebra.decide_fast import quick
from algorist.grading.algebra.real_sets import RealSets
from algorist.grading.algebra.tree import (
    MINUS,
    ONE,
    Node,
    Unreadable,
    add,
    is_scalar,
    mul,
    neg,
    num,
    substitute,
    sym,
    symbols,
)
from algorist.grading.algebra.units import DEGREE, number_in_words, read_unit

_INFINITY = sym("infty")
_INFINITE = frozenset(("infinity", "positive infinity", "negative infinity"))
_NOTHING = re.compile(r"no (?:real )?solutions?|(?:the )?empty set|null set|none")
_REALS = re.compile(r"all reals?|all real (?:numbers|x|values)|(?:the (?:set of )?)?real numbers")
_HALF_LINE = re.compile(
    r"(?:the )?(?:set of )?(?:all )?(?:(positive|negative)|(nonnegative|non negative)) (?:real numbers|reals|real)"
)


def canonical(node: Node) -> Node:
    """Return the tree with what does not change an answer taken off: ``x =``, a degree sign, ``±`` spelled out."""
    kind = node[0]
    if kind == "rel":
        return _relation(node)
    if kind == "list":
        return _list(node)
    if kind in ("set", "tuple"):
        items: list[Node] = []
        for one in node[-1]:
            part = one if one[0] == "rel" else canonical(one)
            items += part[2] if kind == "set" and part[0] == "list" else (part,)
        return (*node[:-1], tuple(items))
    if kind in ("union", "cap", "setminus", "either"):
        return (kind, tuple(canonical(one) for one in node[1]))
    if kind == "text":
        return _text(node[1])
    if kind == "quantity":
        return _quantity(node)
    if kind == "maybe":
        return ("maybe", canonical(node[1]), canonical(node[2]))
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
    if plain in _INFINITE:
        return neg(_INFINITY) if plain.startswith("negative") else _INFINITY
    if _NOTHING.fullmatch(plain):
        return ("set", ())
    if _REALS.fullmatch(plain):
        return ("set_named", "R")
    if half := _HALF_LINE.fullmatch(plain):
        low, high = (neg(_INFINITY), num(0)) if half[1] == "negative" else (num(0), _INFINITY)
        return ("tuple", "[" if half[2] else "(", ")", (low, high))
    if len(plain) == 1:
        return sym(plain.upper())
    counted = _counted(words)
    if counted is not None:
        return counted
    choice = re.fullmatch(r"(?:option|choice|answer) ([a-j])", plain)
    if choice:
        return sym(choice[1].upper())
    return ("text", plain)


def _counted(words: str) -> Node | None:
    """Return ``five hours`` and ``fifty percent`` as quantities; None where no number and unit stand there."""
    parts = words.split()
    for until in range(len(parts) - 1, 0, -1):
        value = number_in_words(" ".join(parts[:until]))
        if value is not None:
            try:
                return read_unit(num(value), " ".join(parts[until:]))
            except Unreadable:
                return None
    return None


def _degrees(node: Node) -> Node:
    """Take the degree sign off ``120°`` and ``90° - x``; inside ``sin 30°`` it stays."""
    if node[0] == "fn" and node[1] == "deg":
        return ("quantity", node[2][0], DEGREE)
    parts = node[1] if node[0] in ("add", "mul") else ()
    if any(part[0] == "fn" and part[1] == "deg" for part in parts):
        bare = [part[2][0] if part[0] == "fn" and part[1] == "deg" else part for part in parts]
        return ("quantity", add(bare) if node[0] == "add" else mul(bare), DEGREE)
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
    if node[0] in ("sym", "name", "formula"):
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
    if terms[-1][0] == "residue" and operators in (("==",), ("=",)):
        return _equation(terms)
    if set(operators) == {"="} or (operators == ("~",) and _is_name(terms[0]) and is_scalar(terms[1])):
        return _equation(terms)
    interval = _interval(operators, terms) if all(o in FLIPPED for o in operators) else None
    return interval or node


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
    if name is None:
        values = [v[1] if v[0] == "maybe" else v for v in values]
    if name is not None and len(values) == 1:
        return ("equals", name, values[0])
    if len(values) > 1:
        told = [equal(values[0], other, quick) for other in values[1:]]
        constant = not any(symbols(v) for v in values)
        if (constant or name is not None) and False not in told:
            last: Node = values[-1] if all(told) else ("chain", tuple(values))
            return ("equals", name, last) if name else last
    if name is None and len(values) == 2 and all(is_scalar(v) for v in values):
        return ("equation", add([values[0], neg(values[1])]), *values)
    raise Unreadable("a chain of equalities that do not hold", "ambiguous")


def _interval(operators: Sequence[str], terms: Sequence[Node]) -> Node | None:
    """Write ``a < x <= b``, ``x > a`` or ``-2x < 6`` as the tuple that the interval is; None for other inequalities."""
    terms = [t[1] if t[0] == "maybe" else t for t in terms]
    if len(terms) not in (2, 3) or not all(is_scalar(t) for t in terms):
        return None
    if len(terms) == 3 and operators[0][0] != operators[1][0]:
        return None
    if len(terms) == 2 and not _is_variable(terms[0]) and not _is_variable(terms[1]):
        terms = [add([terms[0], neg(terms[1])]), num(0)]
    if len(terms) == 2 and _is_variable(terms[1]) and not _is_variable(terms[0]):
        terms, operators = [terms[1], terms[0]], [FLIPPED[operators[0]]]
    if len(terms) == 2:  # x < a is -∞ < x < a
        low = neg(_INFINITY) if operators[0][0] == "<" else _INFINITY
        terms, operators = [low, *terms], [operators[0][0], operators[0]]
    if operators[0][0] == ">":
        terms, operators = terms[::-1], [FLIPPED[o] for o in operators[::-1]]
    low, middle, high = terms
    first, second = operators
    scaled = _linear(middle)
    if (
        scaled is None
        or scaled[2] in symbols(low) | symbols(high)
        or _same_kind_of_letter(scaled[2], low, high)
    ):
        return None
    factor, constant, _ = scaled
    if middle[0] != "sym":
        low, high = (_moved(end, factor, constant) for end in (low, high))
        if factor < 0:
            low, high, first, second = high, low, second, first
    if low[0] == high[0] == "num" and low[1] >= high[1]:
        return None  # 5 < x < 1 is no interval, and not the point (5, 1)
    return ("tuple", "[" if "=" in first else "(", "]" if "=" in second else ")", (low, high))


def _moved(end: Node, factor: Fraction, constant: Node) -> Node:
    """Return (end - constant) / factor, where an end at infinity only changes its sign."""
    if symbols(end) == {"infty"}:
        return end if factor > 0 else neg(end)
    return mul([num(1 / factor), add([end, neg(constant)])])


def _linear(node: Node) -> tuple[Fraction, Node, str] | None:
    """Split ``a·x + b`` into a, b and x; None for anything else."""
    factor, name, constants = Fraction(0), "", []
    for term in node[1] if node[0] == "add" else (node,):
        rest = term[1][1] if term[0] == "mul" and len(term[1]) == 2 and term[1][0][0] == "num" else term
        if not symbols(term):
            constants.append(term)
        elif _is_variable(rest) and not name:
            factor, name = (term[1][0][1] if rest is not term else Fraction(1)), rest[1]
        else:
            return None
    return (factor, add(constants), name) if name else None


def _same_kind_of_letter(name: str, low: Node, high: Node) -> bool:
    """Say whether an end is an unknown like the middle: ``x < y < z`` is no interval of y."""
    unknown = set("xyztuvw")
    return name in unknown and bool(unknown & (symbols(low) | symbols(high)))


def _is_variable(node: Node) -> bool:
    return node[0] == "sym" and node[1] not in ("e", "i", "pi", "infty")


def _list(node: Node) -> Node:
    over = [one[2][0] for one in node[2] if _over_integers(one)]
    rest = tuple(one for one in node[2] if not _over_integers(one))
    if over and rest and all(letter[1] in symbols(rest) for letter in over):
        inner = canonical(rest[0] if len(rest) == 1 else ("list", node[1], rest))
        letters = tuple(letter[1] for letter in over)
        if inner[0] == "equals":
            return ("equals", inner[1], ("every", letters, inner[2]))
        return ("every", letters, inner)
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
    several = len(items) > 1 and all(i[0] in ("tuple", "union", "rel") for i in items)
    if several and all(_is_condition(one) for one in node[2]):
        if node[1] == "or":
            return ("union", tuple(items))
        if len({_unknown(one) for one in node[2]}) == 1 and RealSets().cuts(("cap", tuple(items))):
            return ("cap", tuple(items))  # x >= -2 and x != 3
    if several and node[1] == "or" and all(_is_interval(i) for i in items):
        return ("union", tuple(items))
    return ("list", node[1], tuple(items)) if len(items) > 1 else items[0]


def _over_integers(node: Node) -> bool:
    """Say whether the node is the clause ``k ∈ ℤ`` of a general solution."""
    return node[:2] == ("rel", ("in",)) and node[2][0][0] == "sym" and node[2][1] == ("set_named", "Z")


def _is_condition(node: Node) -> bool:
    """Say whether the node is an inequality, or membership in an interval."""
    return node[0] == "rel" and node[1][0] in (*FLIPPED, "!=", "in")


def _unknown(node: Node) -> frozenset[str]:
    """Return the letters of a relation."""
    return frozenset().union(*(symbols(t) for t in node[2] if is_scalar(t))) - {"e", "i", "pi", "infty"}


def _is_interval(node: Node) -> bool:
    """Say whether a pair can only be an interval: half open, or without end."""
    return node[0] == "tuple" and (
        {node[1], node[2]} in ({"[", ")"}, {"(", "]"}) or any("infty" in symbols(end) for end in node[3])
    )
