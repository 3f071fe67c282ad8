"""The tree with what does not change an answer taken off: ``x =``, a degree sign, ``±`` spelled out, inequalities as intervals."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

from algorist_grader.algebra.compare import FLIPPED, equal
from algorist_grader.algebra.decide_fast import approximate, quick
from algorist_grader.algebra.functions import Unsure
from algorist_grader.algebra.real_sets import RealSets
from algorist_grader.algebra.tree import (
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
from algorist_grader.algebra.units import DEGREE, number_in_words, read_unit

_INFINITY = sym("infty")
_REAL: Node = ("set_named", "R")
_INTEGERS: Node = ("set_named", "Z")
_SETS = frozenset(("tuple", "union", "cap", "setminus", "set_named", "set"))
_MOST_LISTED = 40
_INFINITE = frozenset(("infinity", "positive infinity", "negative infinity"))
_NOTHING = re.compile(
    r"(?:there (?:is|are) )?no (?:real )?solutions?(?: exists?)?|(?:the )?empty set|null set|none"
)
_REALS = re.compile(
    r"all reals?|all real (?:numbers|x|values)|every real number|(?:the (?:set of )?)?real numbers"
)
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
    if kind == "either":
        return (kind, tuple(canonical(one) for one in node[1]))
    if kind in ("union", "cap", "setminus"):
        return _conditions(kind, [canonical(one) for one in node[1]])
    if kind == "where":
        return _where(*node[1:])
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
        return _REAL
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
    """Return ``five hours`` and ``fifty percent`` as quantities; None without a number and a unit."""
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
    """Return whether the node is ``x``, ``f(x)`` or words before an equals sign."""
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
        letters = terms[0][3] if terms[0][0] == "tuple" else ()
        if letters and all(one[0] == "sym" for one in letters):
            return ("equals", ("formula", f"({','.join(one[1] for one in letters)})"), canonical(terms[1]))
        if not _is_name(terms[0]):
            raise Unreadable("membership of something that is no name")
        return ("equals", terms[0], canonical(terms[1]))
    if operators == ("!=",):
        return _all_but(*terms) or _all_but(*terms[::-1]) or node
    if terms[-1][0] == "residue" and operators in (("==",), ("=",)):
        return _equation(terms)
    if set(operators) == {"="} or (operators == ("~",) and _is_name(terms[0]) and not symbols(terms[1])):
        return _equation(terms)
    if operators == ("~",) and _rounds(*terms):
        return canonical(terms[0])
    if not all(o in FLIPPED for o in operators):
        return node
    if len(terms) > 2 and all(o[0] == ">" for o in operators):
        node = ("rel", tuple(FLIPPED[o] for o in operators[::-1]), terms[::-1])
    return _interval(operators, terms) or _of_a_distance(operators, terms) or node


def _rounds(value: Node, decimal: Node) -> bool:
    """Return whether a decimal is a number rounded to its digits: ``12\\pi\\approx 37.7``."""
    if decimal[0] != "num" or not is_scalar(value) or symbols(value):
        return False
    try:
        size = approximate(value, {"e": math.e, "pi": math.pi, "i": 1j})
    except (Unsure, ArithmeticError, ValueError):
        return False
    return abs(size - float(decimal[1])) <= 0.5001 / decimal[1].denominator


def _of_a_distance(operators: Sequence[str], terms: Sequence[Node]) -> Node | None:
    """Write ``|x - 2| < 3`` and ``|x| >= 2`` as the set of x; None for other inequalities."""
    if len(terms) != 2:
        return None
    (left, right), operator = terms, operators[0]
    if left[0] == "num":
        left, right, operator = right, left, FLIPPED[operator]
    if left[:2] != ("fn", "abs") or right[0] != "num" or right[1] <= 0:
        return None
    inner = left[2][0]
    if operator[0] == "<":
        return _interval([operator, operator], [neg(right), inner, right])
    parts = [_interval([FLIPPED[operator]], [inner, neg(right)]), _interval([operator], [inner, right])]
    return _conditions("union", [part for part in parts if part]) if all(parts) else None


def _all_but(letter: Node, value: Node) -> Node | None:
    """Return ``x \\ne 3`` as what x may be; None where no letter is beside a value."""
    if not _is_variable(letter) or not is_scalar(value) or symbols(value) - {"pm", "mp"}:
        return None
    values = canonical(value)
    left_out = ("set", values[2] if values[0] == "list" else (values,))
    return ("equals", letter, ("setminus", (_REAL, left_out)))


def _where(letter: Node, domain: Node | None, inner: Node) -> Node:
    """Return the values of a letter that satisfy a condition."""
    values = canonical(inner)
    if values[0] == "equals" and values[1] == letter:
        values = values[2]
    elif letter[1] not in symbols(values):
        raise Unreadable("a condition on another letter")
    return _within(values, domain) if domain else values


def _conditions(kind: str, parts: Sequence[Node]) -> Node:
    """Return a union, an intersection or a difference of sets; what the sets are said of is said of the whole."""
    names = {str(one[1]): one[1] for one in parts if one[0] == "equals"}
    if len(names) > 1:
        raise Unreadable("conditions on several letters")
    sets = tuple(one[2] if one[0] == "equals" else one for one in parts)
    return ("equals", *names.values(), (kind, sets)) if names else (kind, sets)


def _within(values: Node, domain: Node) -> Node:
    """Return the members of a set that lie in a domain; integers between two ends are listed, others begin at an integer."""
    if values[0] not in _SETS or domain == _REAL:
        return values
    reader = RealSets()
    cuts = reader.cuts(values) or []
    ends = [reader.nodes.get(value, _INFINITY) for value, _ in cuts]
    if len(cuts) != 2 or domain[1] not in "ZN" or any(end[0] != "num" and end != _INFINITY for end in ends):
        return ("cap", (values, domain))
    low, high = (None if end == _INFINITY else end[1] for end in ends)
    low = None if low is None else math.floor(low) + 1 if cuts[0][1] else math.ceil(low)
    high = None if high is None else math.floor(high) if cuts[1][1] else math.ceil(high) - 1
    if domain[1] == "N" and (low is None or low < 1):  # 0 may be one of them or not
        return ("cap", (values, domain))
    if low is not None and high is not None and high - low < _MOST_LISTED:
        return ("set", tuple(num(value) for value in range(low, high + 1)))
    if low is None and high is None:
        return _INTEGERS
    first, last = neg(_INFINITY) if low is None else num(low), _INFINITY if high is None else num(high)
    return (
        "cap",
        (("tuple", "(" if low is None else "[", ")" if high is None else "]", (first, last)), _INTEGERS),
    )


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
        return ("equals", *_in_order(name, values[0]))
    if len(values) > 1:
        verdicts = [equal(values[0], other, quick) for other in values[1:]]
        constant = not any(symbols(v) for v in values)
        if (constant or name is not None or all(verdicts)) and False not in verdicts:
            last: Node = values[-1] if all(verdicts) else ("chain", tuple(values))
            return ("equals", name, last) if name else last
    if name is None and len(values) == 2 and all(is_scalar(v) for v in values):
        return ("equation", add([values[0], neg(values[1])]), *values)
    raise Unreadable("a chain of equalities that do not hold", "ambiguous")


def _in_order(name: Node, value: Node) -> tuple[Node, Node]:
    """Return ``(y, x) = (1, 2)`` as ``(x, y) = (2, 1)``: only names in the order of the alphabet may be left out."""
    sign = "," if value[0] == "tuple" else ":" if value[0] == "ratio" else ""
    letters = str(name[1]).strip("()").split(sign) if sign and name[0] == "formula" else []
    parts = value[-1] if letters else ()
    if (
        len(letters) != len(parts)
        or letters == sorted(letters)
        or not all(len(letter) == 1 for letter in letters)
    ):
        return name, value
    order = sorted(range(len(letters)), key=letters.__getitem__)
    spelled = sign.join(letters[at] for at in order)
    return ("formula", f"({spelled})" if sign == "," else spelled), (
        *value[:-1],
        tuple(parts[at] for at in order),
    )


def _interval(operators: Sequence[str], terms: Sequence[Node]) -> Node | None:
    """Write ``a < x <= b``, ``x > a`` or ``-2x < 6`` as the tuple that the interval is; None for other inequalities."""
    terms = [t[1] if t[0] == "maybe" else t for t in terms]
    if len(terms) not in (2, 3) or not all(is_scalar(t) for t in terms):
        return None
    if len(terms) == 3 and operators[0][0] != operators[1][0]:
        return None
    if len(terms) == 2 and not _is_variable(terms[0]) and not _is_variable(terms[1]):
        terms = [add([terms[0], neg(terms[1])]), num(0)]
    if len(terms) == 2 and _is_variable(terms[1]) and not (_is_variable(terms[0]) and _comes_first(*terms)):
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
    return (
        "equals",
        sym(scaled[2]),
        ("tuple", "[" if "=" in first else "(", "]" if "=" in second else ")", (low, high)),
    )


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
    """Return whether an end is an unknown like the middle: ``x < y < z`` is no interval of y."""
    unknown = set("xyztuvw")
    return name in unknown and bool(unknown & (symbols(low) | symbols(high)))


def _comes_first(letter: Node, other: Node) -> bool:
    """Return whether the first of two letters is an inequality's subject, however it is written: an unknown, else the later one."""
    return (letter[1] in "xyztuvw", letter[1]) >= (other[1] in "xyztuvw", other[1])


def _is_variable(node: Node) -> bool:
    return node[0] == "sym" and node[1] not in ("e", "i", "pi", "infty")


def _list(node: Node) -> Node:
    if len(node[2]) == 2 and node[2][1][:2] == ("rel", ("in",)) and node[2][1][2][1] == ("set_named", "N"):
        formula, letter = canonical(node[2][0]), node[2][1][2][0]
        value = formula[2] if formula[0] == "equals" else formula
        if is_scalar(value) and letter[1] in symbols(value):
            return ("natural", formula)  # 2n - 1, n ∈ N
    over = [one[2][0] for one in node[2] if _over_integers(one)]
    rest = tuple(one for one in node[2] if not _over_integers(one))
    if over and rest and all(letter[1] in symbols(rest) for letter in over):
        inner = canonical(rest[0] if len(rest) == 1 else ("list", node[1], rest))
        letters = tuple(letter[1] for letter in over)
        if inner[0] != "equals":
            return ("every", letters, inner)
        own = inner[1:2] == tuple(over)  # x > 3, x ∈ Z
        return ("equals", inner[1], _within(inner[2], _INTEGERS) if own else ("every", letters, inner[2]))
    parts = [canonical(one) for one in node[2]]
    names = {str(one[1]): one[1] for one in parts if one[0] == "equals"}
    if len(names) > 1:
        if any(one[0] != "equals" or one[2][0] == "list" for one in parts):
            raise Unreadable("a list in which only some values have names")
        return ("named", tuple(sorted(((str(one[1]), one[2]) for one in parts), key=lambda pair: pair[0])))
    items: list[Node] = []
    for one in parts:
        value = one[2] if one[0] == "equals" else one
        items.extend(value[2] if value[0] == "list" else (value,))
    if node[1] == "or" and len(items) > 1 and all(equal(items[0], one, quick) for one in items[1:]):
        items = items[:1]  # 3/8 or 0.375
    whole = _together(node, items) or (("list", node[1], tuple(items)) if len(items) > 1 else items[0])
    return ("equals", *names.values(), whole) if names else whole


def _together(node: Node, items: list[Node]) -> Node | None:
    """Return several conditions on one letter as one set: their union after "or", else their intersection; None for others."""
    if len(items) < 2 or any(one[0] not in _SETS for one in items):
        return None
    if node[1] == "or" and (all(map(_is_condition, node[2])) or all(map(_is_interval, items))):
        return ("union", tuple(items))
    if not all(map(_is_condition, node[2])):
        return None
    domains = [one for one in items if one[0] == "set_named" and one != _REAL]
    rest = tuple(one for one in items if one not in domains)
    if len(domains) == 1 and rest:  # x > 3, x ∈ N
        return _within(rest[0] if len(rest) == 1 else ("cap", rest), domains[0])
    return ("cap", rest) if RealSets().cuts(("cap", rest)) else None  # x >= -2 and x != 3


def _over_integers(node: Node) -> bool:
    """Return whether the node is the clause ``k ∈ ℤ`` of a general solution."""
    return node[:2] == ("rel", ("in",)) and node[2][0][0] == "sym" and node[2][1] == _INTEGERS


def _is_condition(node: Node) -> bool:
    """Return whether the node is an inequality, or membership in an interval."""
    return node[0] == "rel" and node[1][0] in (*FLIPPED, "!=", "in")


def _is_interval(node: Node) -> bool:
    """Return whether a pair can only be an interval: half open, or without end."""
    return node[0] == "tuple" and (
        {node[1], node[2]} in ({"[", ")"}, {"(", "]"}) or any("infty" in symbols(end) for end in node[3])
    )
