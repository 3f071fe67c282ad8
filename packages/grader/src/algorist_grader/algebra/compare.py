"""Two trees → equal, different, or None (only more digits can tell). Rules for what answers may be written like.

``scalar`` decides on two expressions: ``decide_fast`` in this process, ``decide_exact`` in a worker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from algorist_grader.algebra import real_sets
from algorist_grader.algebra.decide_fast import exact
from algorist_grader.algebra.functions import Unsure
from algorist_grader.algebra.tree import (
    Node,
    Unreadable,
    add,
    divide,
    is_scalar,
    mul,
    neg,
    num,
    substitute,
    sym,
    symbols,
)
from algorist_grader.algebra.units import DEGREE, PERCENT, RADIAN, one_letter_unit

Scalar = Callable[[Node, Node], bool | None]
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_MOST_ITEMS = 40
_CONSTANTS = frozenset(("C", "c", "K", "k", "C_1", "c_1"))
_INFINITY = sym("infty")


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    unsure = False
    for verdict in verdicts:
        if verdict is False:
            return False
        unsure = unsure or verdict is None
    return None if unsure else True


def _any(verdicts: Sequence[bool | None]) -> bool | None:
    if True in verdicts:
        return True
    return None if None in verdicts else False


def _pairs(a: Sequence[Node], b: Sequence[Node], scalar: Scalar) -> bool | None:
    return len(a) == len(b) and _all(equal(one, other, scalar) for one, other in zip(a, b, strict=True))


def _values(named: Node) -> list[Node]:
    return [value for _, value in named[1]]


def _unordered(a: Sequence[Node], b: Sequence[Node], scalar: Scalar, *, as_set: bool) -> bool | None:
    if max(len(a), len(b)) > _MOST_ITEMS or (not as_set and len(a) != len(b)):
        return False
    left = list(b)
    unsure = False
    for one in a:
        partner: int | None = None
        for place, other in enumerate(left):
            verdict = equal(one, other, scalar)
            if verdict:
                partner = place
                break
            unsure = unsure or verdict is None
        if partner is None:
            return None if unsure else False
        if not as_set:
            left.pop(partner)
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
    if a[0] == "maybe" or b[0] == "maybe":
        return _maybe_units(a, b, scalar)
    if a[0] == "natural" or b[0] == "natural":  # a formula in n, which counts: not one over all integers
        first, second = (node[1] if node[0] == "natural" else node for node in (a, b))
        over_all = any((node[2] if node[0] == "equals" else node)[0] == "every" for node in (first, second))
        return not over_all and equal(first, second, scalar)
    if a[0] == "either" or b[0] == "either":
        ones, others = (n[1] if n[0] == "either" else (n,) for n in (a, b))
        if ones[-1] == others[-1] and ones[-1][0] == "tuple" and len(ones) == len(others):
            ones, others = ones[:1], others[:1]  # P(5,2) and C(5,2): two counts, not a point twice
        return _any([equal(one, other, scalar) for one in ones for other in others])
    if a[0] == "equals" or b[0] == "equals":
        return _named_value(a, b, scalar)
    if a[0] == "every" or b[0] == "every":
        return _general(a, b, scalar)
    if a[0] == "residue" or b[0] == "residue":
        return _residues(a, b, scalar)
    if a[0] == "quantity" or b[0] == "quantity":
        return _quantities(a, b, scalar)
    if is_scalar(a) and is_scalar(b):
        return _scalars(a, b, scalar)
    if {a[0], b[0]} == {"base", "num"}:
        numeral, value = (a, b) if a[0] == "base" else (b, a)
        return numeral[2] == "10" and numeral[1] == str(value[1])
    if b[:2] == ("list", "") and a[0] in ("list", "set", "named"):  # 5,12 for 12,5 may be another number
        return _pairs(_values(a) if a[0] == "named" else a[-1], b[2], scalar)
    kinds = {a[0], b[0]}
    if "set" in kinds and kinds != {"set"}:
        one, other = (a, b) if a[0] == "set" else (b, a)
        if len(one[1]) == 1 and (is_scalar(other) or other[0] == "tuple"):  # {3} is x = 3
            return equal(one[1][0], other, scalar)
    if kinds == {"set_named", "sym"}:  # R, \mathbf{R}
        return bool(a[1] == b[1])
    if kinds & real_sets.KINDS:
        same = _real_sets(a, b, scalar)
        if same is not None:
            return same
    if kinds == {"tuple"}:
        return a[1:3] == b[1:3] and _pairs(a[3], b[3], scalar)
    if kinds == {"set"}:
        of_sets = [{part[0] == "set" for part in node[1]} for node in (a, b)]  # {{3}} is not {3}
        return of_sets[0] == of_sets[1] and _unordered(a[1], b[1], scalar, as_set=True)
    if kinds == {"list"}:
        return _unordered(a[2], b[2], scalar, as_set=False)
    if kinds == {"set", "list"}:
        one, other = (a, b) if a[0] == "set" else (b, a)
        return _unordered(one[1], other[2], scalar, as_set=False)
    if kinds == {"union"}:
        return _unordered(a[1], b[1], scalar, as_set=True)
    if kinds == {"cap"} or kinds == {"setminus"}:
        return _pairs(a[1], b[1], scalar)
    if kinds == {"named"}:
        same_names = [name for name, _ in a[1]] == [name for name, _ in b[1]]
        return same_names and _pairs(_values(a), _values(b), scalar)
    if "named" in kinds and kinds & {"set", "list"}:
        named, other = (a, b) if a[0] == "named" else (b, a)
        one_letter = len({name.partition("_")[0] for name, _ in named[1]}) == 1  # x_1 and x_2
        if one_letter:
            return _unordered(_values(named), other[-1], scalar, as_set=False)
        return _pairs(_values(named), other[-1], scalar)  # a = 2, b = 3 beside 2, 3
    if kinds == {"named", "tuple"}:
        named, point = (a, b) if a[0] == "named" else (b, a)
        return point[1:3] == ("(", ")") and _pairs(_values(named), point[3], scalar)
    if kinds == {"matrix"}:
        left, right = ([("tuple", "(", ")", row) for row in node[1]] for node in (a, b))
        return _pairs(left, right, scalar)
    if kinds == {"matrix", "tuple"}:
        return _vector(a, b, scalar)
    if kinds & {"matrix", "tuple"} and (is_scalar(a) or is_scalar(b)):  # 3i + 4j
        point, expression = (a, b) if is_scalar(b) else (b, a)
        components = _components(
            expression, max(map(len, (point[1], point[1][0]))) if point[0] == "matrix" else len(point[3])
        )
        return equal(point, components, scalar) if components else False
    return _others(a, b, scalar)


def _components(node: Node, count: int) -> Node | None:
    """Return ``i - 2j + 3k`` as a point; None for what is no such sum, or has no ``j`` and so may be a complex number."""
    letters = [sym(letter) for letter in "ijk"[:count]]
    if count not in (2, 3) or sym("j") not in _factors(node):
        return None
    values = []
    for one in letters:
        rest = node
        for letter in letters:
            rest = substitute(rest, letter[1], num(1 if letter == one else 0))
        values.append(rest)
    same = add(mul([value, letter]) for value, letter in zip(values, letters, strict=True)) == node
    return ("tuple", "(", ")", tuple(values)) if same and not symbols(tuple(values)) else None


def _factors(node: Node) -> list[Node]:
    """Return the factors of the terms of a sum."""
    return [
        part
        for term in (node[1] if node[0] == "add" else (node,))
        for part in (term[1] if term[0] == "mul" else (term,))
    ]


def _others(a: Node, b: Node, scalar: Scalar) -> bool | None:
    kinds = {a[0], b[0]}
    if kinds == {"ratio"}:
        return _ratios(a[1], b[1], scalar)
    if "ratio" in kinds:
        ratio, other = (a, b) if a[0] == "ratio" else (b, a)
        terms = ratio[1]
        if len(terms) != 2 or not all(is_scalar(t) for t in (other, *terms)) or _clock(terms):
            return False
        return terms[1] != num(0) and equal(divide(*terms), other, scalar)
    if kinds == {"equation"}:
        return _equations(a[1], b[1], scalar)
    if kinds == {"rel"}:
        return _inequalities(a, b, scalar)
    if kinds == {"text", "sym"}:
        text, symbol = (a, b) if a[0] == "text" else (b, a)
        return bool(text[1] == symbol[1].lower())
    return False


def _real_sets(a: Node, b: Node, scalar: Scalar) -> bool | None:
    """Compare two sets of reals cut by cut; None where one of them cannot be read as such a set."""
    reader = real_sets.RealSets()
    left, right = reader.cuts(a), reader.cuts(b)
    if left is None or right is None:
        return None
    if left == right:
        return True
    if [side for _, side in left] != [side for _, side in right]:
        return False
    nodes = [[reader.nodes.get(value, _INFINITY) for value, _ in cuts] for cuts in (left, right)]
    return _all([scalar(one, other) for one, other in zip(*nodes, strict=True)])


def _maybe_units(a: Node, b: Node, scalar: Scalar) -> bool | None:
    """``5 m`` is five metres beside a number or a quantity, 5·m beside an expression, and either beside its like."""
    if a[0] == b[0] == "maybe":
        products, quantities = equal(a[1], b[1], scalar), equal(a[2], b[2], scalar)
        return True if True in (products, quantities) else _all([products, quantities])
    maybe, other = (a, b) if a[0] == "maybe" else (b, a)
    letters = other[0] in ("equation", "rel") or (is_scalar(other) and symbols(other))
    return equal(maybe[1] if letters else maybe[2], other, scalar)


def _scalars(a: Node, b: Node, scalar: Scalar) -> bool | None:
    if a[0] == b[0] == "sym" and len(a[1]) == len(b[1]) == 1 and a[1].upper() == b[1].upper():
        choice = a[1].upper() in "ABCDEFGHJ" and b[1] != "e"  # Euler's number, though E may be a choice
        return choice or a[1] == b[1]
    left, right = _constant(a), _constant(b)
    if left and right and left != right and left not in symbols(b):
        a = substitute(a, left, sym(right))
    return scalar(a, b)


def _constant(node: Node) -> str:
    """Return the letter of a constant of integration, ``F(x) + C``, or ""."""
    names = [t[1] for t in node[1] if t[0] == "sym" and t[1] in _CONSTANTS] if node[0] == "add" else []
    rest = [t for t in node[1] if t[0] != "sym" or t[1] not in names] if names else []
    return names[0] if len(names) == 1 and rest and not any(names[0] in symbols(t) for t in rest) else ""


def _named_value(a: Node, b: Node, scalar: Scalar) -> bool | None:
    """``x = 5`` is ``5``, and ``x = 5``, but not ``y = 5``; as equations ``y = 2x`` is ``2x - y = 0``."""
    if a[0] == b[0] == "equals":
        if _same_name(a[1], b[1]):
            return equal(a[2], b[2], scalar)
        if not {a[1][0], b[1][0]} & {"name", "formula"} and is_scalar(a[2]) and is_scalar(b[2]):
            return _equations(_difference(a), _difference(b), scalar)
        return False
    named, other = (a, b) if a[0] == "equals" else (b, a)
    if other[0] == "equation":
        readable = is_scalar(named[2]) and is_scalar(named[1])
        return _equations(_difference(named), other[1], scalar) if readable else False
    if other[0] == "named" and named[1][0] == "formula" and named[2][0] == "tuple":
        values = dict(other[1])
        in_order = [values.get(str(sym(letter))) for letter in named[1][1].strip("()").split(",")]
        values_in_order = [v for v in in_order if v is not None]
        return len(in_order) == len(values) and _pairs(values_in_order, named[2][3], scalar)
    names = [name for name, _ in other[1]] if other[0] == "named" and named[1][0] != "name" else []
    if not all(name.startswith(str(named[1])[:-2]) for name in names):  # x = 1, 2 beside x_1 = 1, x_2 = 2
        return False
    return equal(named[2], other, scalar) if named is a else equal(other, named[2], scalar)


def _same_name(a: Node, b: Node) -> bool:
    """Return whether two left sides name one thing: the same name, ``y`` and ``f(x)``, or words beside a letter."""
    if a == b:
        return True
    if a[0] == b[0] == "formula":  # y' beside dy/dx
        return a[1].startswith(f"{b[1]}/") or b[1].startswith(f"{a[1]}/")
    if {a[0], b[0]} == {"mul", "sym"} and sym("y") in (a, b):
        return True
    if "formula" in (a[0], b[0]) and sym("y") in (a, b):
        return bool(re.fullmatch(r"[fgy]\(\w\)", (a if a[0] == "formula" else b)[1]))
    return (a[0] == "name") != (b[0] == "name")


def without_question(answer: Node, gold: Node) -> Node:
    """Return the right side of ``m + n = 113`` where the gold is a bare number: the left side only repeats the question."""
    if answer[0] != "equation" or not is_scalar(gold) or symbols(gold):
        return answer
    left, right = answer[2], answer[3]
    return right if _without_numbers(left) and symbols(left) and not symbols(right) else answer


def _without_numbers(node: Node) -> bool:
    """Return whether an expression is put together from letters only: a sum, a quotient, the sine of an angle."""
    if node[0] == "num":
        return bool(abs(node[1]) == 1)
    if node[0] == "fn":
        return node[1] in ("sin", "cos", "tan") and node[2][0][0] == "sym"
    return node[0] == "sym" or all(
        _without_numbers(part) for part in (node[1] if node[0] in ("add", "mul") else node[1:])
    )


def _chained(a: Node, b: Node, scalar: Scalar) -> bool | None:
    """A chain of equal values says its last one, if its parts are equal indeed."""
    verdicts: list[bool | None] = []
    for node in (a, b):
        if node[0] == "chain":
            verdicts += [equal(node[1][0], other, scalar) for other in node[1][1:]]
    left, right = (n[1][-1] if n[0] == "chain" else n for n in (a, b))
    return _all([*verdicts, equal(left, right, scalar)])


def _difference(node: Node) -> Node:
    return add([node[1], neg(node[2])])


def _equations(a: Node, b: Node, scalar: Scalar) -> bool | None:
    """Two equations ``a = 0`` and ``b = 0`` are the same if ``a`` is a constant times ``b``."""
    names = symbols(a) | symbols(b)
    if symbols(a) != symbols(b) or not names:
        return scalar(a, b)
    for start in (3, 11, 26):
        at_a, at_b = a, b
        for place, name in enumerate(sorted(names)):
            value = num(Fraction(start + 2 * place, 7))
            at_a, at_b = substitute(at_a, name, value), substitute(at_b, name, value)
        if all(scalar(value, num(0)) is False for value in (at_a, at_b)):  # no identity, no point of both
            return scalar(mul([a, at_b]), mul([b, at_a]))
        if scalar(at_a, at_b) is False:  # the point lies on one of the curves only
            return False
    return None


def _inequalities(a: Node, b: Node, scalar: Scalar) -> bool | None:
    if len(a[1]) != 1 or len(b[1]) != 1:
        comparable = a[1] == b[1] and all(is_scalar(t) for t in (*a[2], *b[2]))
        return comparable and _pairs(a[2], b[2], scalar)

    def upward(node: Node) -> tuple[str, Node]:
        operator, (left, right) = node[1][0], node[2]
        if not (is_scalar(left) and is_scalar(right)):
            raise Unreadable("an inequality of things that are not numbers")
        if operator in (">", ">="):
            operator, left, right = FLIPPED[operator], right, left
        return operator, add([left, neg(right)])

    (one, left), (other, right) = upward(a), upward(b)
    if one != other:
        return False
    if one in ("!=", "~"):
        return _equations(left, right, scalar)
    same = scalar(left, right)
    if same is not False:
        return same
    at = dict.fromkeys(symbols(left) | symbols(right), Fraction(5, 7))
    try:
        positive = exact(left, at) * exact(right, at) > 0
    except (Unsure, ZeroDivisionError, KeyError):
        return False
    return _equations(left, right, scalar) if positive else False


def _quantities(a: Node, b: Node, scalar: Scalar) -> bool | None:
    """Units must agree where both have one; a missing unit is forgiven, a wrong one is not. ``50%`` is 50 and 0.5."""
    if a[0] == b[0] == "quantity":
        (left, one), (right, other) = a[2], b[2]
        if one == other:
            scaled = [mul([num(f), n[1]]) for f, n in ((left, a), (right, b))]
            return scalar(scaled[0], scaled[1])
        if {one, other} == {DEGREE[1], RADIAN[1]}:
            in_degrees, in_radians = (a, b) if one == DEGREE[1] else (b, a)
            return scalar(mul([in_degrees[1], sym("pi"), num(Fraction(1, 180))]), in_radians[1])
        return False
    measured, bare = (a, b) if a[0] == "quantity" else (b, a)
    if bare[0] == "mul" and len(bare[1]) == 2 and bare[1][0][0] == "num" and bare[1][1][0] == "sym":
        unit = one_letter_unit(bare[1][1][1])
        if unit is not None:  # "3 m" beside "300 cm" is three metres
            return equal(measured, ("quantity", bare[1][0], unit), scalar)
    if not is_scalar(bare):
        return False
    verdict = scalar(measured[1], bare)
    if verdict is not True and measured[2] == PERCENT:
        part = scalar(mul([num(Fraction(1, 100)), measured[1]]), bare)
        return part if part is not False else verdict
    return verdict


def _general(a: Node, b: Node, scalar: Scalar) -> bool | None:
    """Compare general solutions; the letter of a clause ``k ∈ ℤ`` may be another, run backwards or begin elsewhere.

    Where only one side has its clause, the letter must be the same, or ``k`` in a multiple of π.
    """
    left, right = (n[2] if n[0] == "every" else n for n in (a, b))
    if a[0] != b[0] or len(a[1]) != 1 or len(b[1]) != 1 or not (is_scalar(left) and is_scalar(right)):
        if a[0] == b[0] and a[1] != b[1]:
            right = _renamed(right, dict(zip(b[1], a[1], strict=False)))
        elif a[0] != b[0] and is_scalar(left) and is_scalar(right):
            (letter,), bare = (a[1], b) if a[0] == "every" else (b[1], a)
            if symbols(bare) == {"k"} and sym("pi") in _factors(
                add([bare, neg(substitute(bare, "k", num(0)))])
            ):
                left, right = (_renamed(one, {letter: "k"}) for one in (left, right))
        return equal(left, right, scalar)
    letter = sym(a[1][0])
    starts = [add([mul([num(sign), letter]), num(shift)]) for sign in (1, -1) for shift in (0, 1, -1)]
    return _any([scalar(left, substitute(right, b[1][0], start)) for start in starts])


def _renamed(node: Node, letters: dict[str, str]) -> Node:
    if node[:1] == ("sym",):
        return sym(letters.get(str(node[1]), str(node[1])))
    return tuple(_renamed(part, letters) if isinstance(part, tuple) else part for part in node)


def _residues(a: Node, b: Node, scalar: Scalar) -> bool | None:
    """``10 (mod 7)`` is ``3 (mod 7)``; a number without a modulus is no residue."""
    if a[0] != b[0]:
        return False
    if a[1][0] == b[1][0] == a[2][0] == b[2][0] == "num":
        return bool(a[2] == b[2] and a[2][1] and ((a[1][1] - b[1][1]) / a[2][1]).denominator == 1)
    return _pairs(a[1:], b[1:], scalar)


def _clock(terms: Sequence[Node]) -> bool:
    """Return whether ``a:b`` can be a time of day."""
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


def _vector(a: Node, b: Node, scalar: Scalar) -> bool | None:
    matrix, point = (a, b) if a[0] == "matrix" else (b, a)
    rows = matrix[1]
    if point[1:3] not in (("(", ")"), ("[", "]")):
        return False
    if all(row[0] == "tuple" and row[1:3] == ("(", ")") for row in point[3]):  # ((1,2),(3,4))
        return _pairs([("tuple", "(", ")", row) for row in rows], point[3], scalar)
    if len(rows) == 1:
        return _pairs(rows[0], point[3], scalar)
    return _pairs([row[0] for row in rows], point[3], scalar) if len(rows[0]) == 1 else False
