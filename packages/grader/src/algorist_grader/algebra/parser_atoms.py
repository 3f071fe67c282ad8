"""The inner half of the grammar: powers, brackets, functions, fractions, matrices. ``parser.Parser`` has the outer half."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from algorist_grader.algebra.tokens import Token
from algorist_grader.algebra.tree import (
    HALF,
    MINUS,
    ONE,
    Node,
    Unreadable,
    as_scalar,
    divide,
    entries,
    fn,
    is_scalar,
    matrix,
    mul,
    neg,
    num,
    power,
    sym,
)
from algorist_grader.algebra.units import NO_UNIT, is_noun, read_unit

MAX_DEPTH = 40
_CLOSERS = {"(": ")", "[": "]", "\\{": "\\}"}
MATRICES = frozenset(
    "pmatrix bmatrix matrix smallmatrix vmatrix array Bmatrix psmallmatrix bsmallmatrix".split()
)
FRACTIONS = ("frac", "dfrac", "tfrac", "cfrac")
BINOMIALS = ("binom", "dbinom", "tbinom")
_ALIAS = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
_NEVER = NO_UNIT | frozenset("in is no or yes not the per if of to at by an on".split())
_SHORT = frozenset("at it is as an by if".split())
"""Words that are products between brackets: ``e^{-at}``."""
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_SETS = {"R", "Z", "N", "Q", "C"}


class Atoms:
    """A cursor over the tokens of one answer, and everything that binds tighter than a product."""

    # what the outer half reads
    items: Callable[[], Node]
    sum: Callable[[], Node]
    measured: Callable[[], Node]
    _starts_factor: Callable[[], bool]

    def __init__(self, tokens: list[Token], *, units_are_letters: bool = False) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.bars = 0
        self.inner = 0
        self.units_are_letters = units_are_letters
        self.has_relation = any(token.kind == "rel" for token in tokens)

    # -- looking ahead -------------------------------------------------------------------------------------------
    def peek(self, ahead: int = 0) -> tuple[str, object]:
        place = self.at + ahead
        if place < len(self.tokens):
            token = self.tokens[place]
            return token.kind, token.value
        return "end", None

    def sees(self, *values: str) -> bool:
        kind, value = self.peek()
        return kind in ("op", "cmd") and value in values

    # -- the only ways to move: what was stepped over is in the tree, or the tokens are still to be read -------------
    def step(self) -> Token:
        """Step over the next token and return it."""
        self.at += 1
        return self.tokens[self.at - 1]

    def attempt(self, read: Callable[[], Node | None]) -> Node | None:
        """Try a reader on the tokens here; where it makes nothing of them, they are still to be read."""
        start = self.at
        node = read()
        if not node:
            self.at = start
        return node

    def again(self, start: int, read: Callable[[], Node]) -> Node:
        """Return another reading of the tokens from ``start`` to here.

        Raises:
            Unreadable: That reading ends elsewhere.
        """
        end, self.at = self.at, start
        node = read()
        if self.at != end:
            raise Unreadable("two readings of different lengths")
        return node

    def take(self, *values: str) -> str:
        """Step over one of these signs and return it; "" at another token."""
        kind, value = self.peek()
        if kind not in ("op", "cmd") or value not in values:
            return ""
        self.at += 1
        return str(value)

    def need(self, value: str) -> None:
        if not self.take(value):
            raise Unreadable(f"expected {value!r}, found {self.peek()[1]!r}")

    def _deeper(self, read: Callable[[], Node]) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deep", "too_large")
        node = read()
        self.depth -= 1
        return node

    def _inside(self, read: Callable[[], Node]) -> Node:
        """Read the content of brackets: one level deeper, where no single letter is a unit."""
        self.inner += 1
        node = self._deeper(read)
        self.inner -= 1
        return node

    def _after_sign(self, sign: str, read: Callable[[], Node]) -> Node:
        inner = self._deeper(read)
        return neg(as_scalar(inner)) if sign == "-" else inner

    def is_product(self) -> bool:
        """Return whether the run of letters here is a product: ``kx``, ``abc``; words and names of units are not."""
        kind, value = self.peek()
        word = str(value)
        if kind != "word" or not (letters(word) or (word in _SHORT and self._in_a_formula())):
            return False
        if is_noun(word):
            return self.units_are_letters
        before = self.tokens[self.at - 1].kind if self.at else "end"
        if before == "num" and self.tokens[self.at].space:
            return len(word) == 2 or not re.search("[aeiou]", word) or word in _ALPHABET
        after = self.peek(1)
        return before != "end" or not (after[0] in ("word", "text") and str(after[1]) not in ("and", "or"))

    def _in_a_formula(self) -> bool:
        """Return whether the word here is between brackets, touches what is before it, or is raised to a power."""
        touches = self.at > 0 and not self.tokens[self.at].space and self.tokens[self.at - 1].kind != "op"
        return (
            bool(self.inner)
            or touches
            or self.peek(1) == ("op", "^")
            or self.tokens[self.at - 1].value == "}"
        )

    def _split(self) -> None:
        """Put single letters in place of the run of letters here, so that a power belongs to the last one."""
        run = self.tokens[self.at]
        spelled = [Token("sym", c, run.space and not i) for i, c in enumerate(str(run.value))]
        self.tokens[self.at : self.at + 1] = spelled

    # -- powers and atoms ----------------------------------------------------------------------------------------
    def power(self) -> Node:
        return self._deeper(lambda: self._postfix(self.atom()))

    def _postfix(self, node: Node) -> Node:
        while True:
            if self.take("^"):
                node = self._raised(node)
            elif self.take("!"):
                node = fn("double_factorial" if self.take("!") else "factorial", as_scalar(node))
            elif self.sees("_"):
                node = self._subscript(node)
            elif mark := self.take("degree", "'"):
                node = fn("deg" if mark == "degree" else "prime", as_scalar(node))
            else:
                return node

    def _circle(self) -> Node | None:
        """Read the circle of a degree sign, braces around it or not, and the scale that may follow."""
        braces = 0
        while self.take("{"):
            braces += 1
        if not self.take("circ"):
            return None
        for _ in range(braces):
            self.need("}")
        scale = self.peek()
        celsius = scale[1] in ("C", "F") and scale[0] in ("sym", "text")
        return ("unit", f"deg{self.step().value}" if celsius else "")

    def _raised(self, node: Node) -> Node:
        if circle := self.attempt(self._circle):
            return read_unit(as_scalar(node), circle[1]) if circle[1] else fn("deg", as_scalar(node))
        if self.take("prime", "'"):
            return fn("prime", as_scalar(node))
        if node[0] == "matrix" and self.peek() == ("sym", "T"):
            raise Unreadable("a transpose")
        exponent = self._argument(signed=True)
        if node[0] == "fn" and node[1] == "deg":
            raise Unreadable("a power of degrees")
        return power(as_scalar(node), as_scalar(exponent))

    def _argument(self, *, signed: bool = False) -> Node:
        """Parse one LaTeX argument: a group, or one digit, letter or command."""
        if self.take("{"):
            node = self._inside(self.sum)
            self.need("}")
            return node
        if not signed:
            return self._one_digit() if self.peek()[0] == "num" else self.atom()
        if sign := self.take("-", "+"):
            return self._after_sign(sign, lambda: self._argument(signed=True))
        atom = self.atom()
        return self._raised(atom) if self.take("^") else atom  # 2^3^2

    def _one_digit(self) -> Node:
        """LaTeX takes one digit: ``\\frac12`` is 1 over 2."""
        token = self.step()
        pair: tuple[Fraction, str] = token.value  # type: ignore[assignment]
        value, written = pair
        if len(written) <= 1 or not written.isdigit():
            return num(value)
        parts = (written[0], token.space), (written[1:], False)
        self.tokens[self.at - 1 : self.at] = [Token("num", (Fraction(p), p), space) for p, space in parts]
        return num(int(written[0]))

    def _subscript(self, node: Node) -> Node:
        before = self.tokens[self.at - 1]
        self.need("_")
        if node[0] == "num" and before.kind == "num" and before.value[0] == node[1]:  # type: ignore[index]
            return ("base", str(before.value[1]).lstrip("0") or "0", self._name_in_braces())  # type: ignore[index]
        if node[0] == "sym":
            return sym(f"{node[1]}_{self._name_in_braces()}")
        raise Unreadable("a subscript")

    def _name_in_braces(self) -> str:
        if self.take("{"):
            parts: list[str] = []
            while not self.sees("}"):
                parts.append(self._spelling())
            self.need("}")
            return "".join(parts)
        return self._spelling()

    def _spelling(self) -> str:
        kind, value = self.peek()
        if kind not in ("num", "sym", "text", "word") and not (kind == "op" and value in (",", "+", "-")):
            raise Unreadable("a subscript")
        return self.step().text

    def atom(self) -> Node:
        kind, value = self.peek()
        if kind == "word" and self.is_product():
            self._split()
            return self.atom()
        if kind != "end":
            self.step()
        if kind == "num":
            return num(value[0])  # type: ignore[index]
        if kind == "sym":
            applied = self.attempt(self._applied) if value == "f" and self.sees("(") else None
            return applied or sym(str(value))
        if kind == "fn":
            return self._function(str(value))
        if kind == "op":
            return self._bracketed(str(value))
        if kind == "cmd":
            return self._command(str(value))
        raise Unreadable(f"unexpected {value!r}")

    def _applied(self) -> Node | None:
        """Read what the letter ``f`` is applied to, ``f(2x)``; None for several arguments."""
        self.need("(")
        inner = self._container("(")
        return fn("f", inner) if is_scalar(inner) else None

    def _bracketed(self, value: str) -> Node:
        if value == "{":
            node = self._inside(self.sum)
            if self.take("choose"):
                node = fn("binomial", as_scalar(node), as_scalar(self._inside(self.sum)))
            elif self.take("over"):
                node = divide(as_scalar(node), as_scalar(self._inside(self.sum)))
            self.need("}")
            return node
        if value == "|":
            self.bars += 1
            inner = self._inside(self.sum)
            self.bars -= 1
            self.need("|")
            return fn("determinant", *entries(inner)) if inner[0] == "matrix" else fn("abs", as_scalar(inner))
        if value in ("(", "[", "\\{"):
            return self._container(value)
        raise Unreadable(f"unexpected {value!r}")

    def _beside_a_factor(self, opened: int) -> bool:
        """Return whether what was opened at a place and closed just now is beside another factor: ``[3](4)``."""
        before = self.tokens[opened - 1] if opened else Token("op", "(")
        return before.kind in ("num", "sym") or before.value in (")", "]", "*", "}") or self._starts_factor()

    def _container(self, opener: str) -> Node:
        opened = self.at - 1
        if opener == "\\{" and self.take("\\}"):
            return ("set", ())
        bars, self.bars = self.bars, 0
        builder = self.attempt(self._bound) if opener == "\\{" else None
        inner = self._inside(self.items)
        self.bars = bars
        if builder:
            self.need("\\}")
            return ("where", *builder, inner)
        closer = next((c for c in (")", "]", "\\}", "rangle") if self.take(c)), None)
        if closer is None:
            raise Unreadable("a bracket is not closed")
        items = inner[2] if inner[0] == "list" and inner[1] == "," else (inner,)
        if opener == "\\{" and closer == "\\}":
            return ("set", items)
        if opener == "\\{" or closer == "\\}":
            raise Unreadable("brackets that do not match")
        if len(items) == 1:
            if closer != _CLOSERS[opener]:
                raise Unreadable("brackets that do not match")
            if opener == "[" and items[0][0] == "num" and self._beside_a_factor(opened):
                raise Unreadable("square brackets around a factor")
            if opener == "[" and items[0][0] == "tuple":
                return ("matrix", (items[0][3],))
            return items[0]
        if opener == "[" and closer == "]" and all(i[0] == "tuple" and i[1] == "[" for i in items):
            return matrix([i[3] for i in items])
        return ("tuple", opener, closer, items)

    def _bound(self) -> Node | None:
        """Read ``x \\in D |`` inside braces: the letter and its domain (None: any); the set is what follows says of the letter."""
        if self.peek()[0] != "sym":
            return None
        letter, domain = sym(str(self.step().value)), None
        if self.peek() == ("rel", "in") and self.peek(1)[1] in ("mathbb", "Bbb"):
            self.step()
            domain = self._command(str(self.step().value))
        if not self.take("|", ":"):
            if self.peek() != ("rel", "mid"):
                return None
            self.step()
        return letter, domain

    def _function(self, name: str) -> Node:
        name = _ALIAS.get(name, name)
        if name in ("sqrt", "cbrt"):
            return self._root(name)
        if name in ("max", "min", "gcd", "lcm", "det", "arg", "re", "im", "sgn", "abs", "floor", "ceil"):
            self.need("(")
            node = self._container("(")
            arguments = node[3] if node[0] == "tuple" else (node,)
            return fn(name, *(as_scalar(a) for a in arguments))
        exponent: Node | None = None
        base: Node | None = None
        while which := self.take("^", "_"):
            argument = as_scalar(self._argument(signed=which == "^"))
            if which == "^":
                exponent = argument
            else:
                base = argument
        argument = self._function_argument()
        if name == "lg":
            name, base = "log", num(10)
        if name == "cis":
            node = power(sym("e"), mul([sym("i"), argument]))
        elif name == "exp":
            node = power(sym("e"), argument)
        elif name == "log" and base is not None:
            node = divide(fn("ln", argument), fn("ln", base))
        elif exponent == MINUS and name in ("sin", "cos", "tan", "cot"):
            return fn("arc" + name, argument)
        else:
            node = fn(name, argument)
        return node if exponent is None else power(node, exponent)

    def _function_argument(self) -> Node:
        """``sin(x)``, ``sin x``, ``sin 2\\sqrt3 x``: without brackets the argument ends at a sign or the next function."""
        if self.sees("(", "[", "{", "|"):  # sin(x)^2 is the square of sin(x)
            return as_scalar(self._deeper(self.atom))
        sign = MINUS if self.take("-") else ONE
        factors = [self._deeper(self.power)]
        while self._starts_factor() and not self.sees("(", "["):
            kind, value = self.peek()
            root = value in ("sqrt", "cbrt") and len(factors) == 1 and factors[0][0] == "num"  # ln 2√2
            if kind == "num" or (kind == "fn" and not root):
                break
            factors.append(self._deeper(self.power))
        if self.peek(1)[0] == "num" and self.take("/"):
            factors.append(power(as_scalar(self._deeper(self.power)), MINUS))
        return mul([sign, *(as_scalar(f) for f in factors)])

    def _root(self, name: str) -> Node:
        index: Node = num(3) if name == "cbrt" else num(2)
        if self.take("["):
            index = as_scalar(self.sum())
            self.need("]")
        if self.take("("):
            argument = as_scalar(self._container("("))
        elif self.sees("{"):
            argument = as_scalar(self._argument())
        else:
            argument = as_scalar(self._inside(self.atom))
        if index == num(2):
            return power(argument, HALF)
        odd = index[0] == "num" and index[1].denominator == 1 and index[1] % 2 == 1
        if odd and argument[0] == "num" and argument[1] < 0:
            return neg(power(neg(argument), power(index, MINUS)))
        return power(argument, power(index, MINUS))

    def _command(self, value: str) -> Node:
        if value in FRACTIONS:
            top, bottom = self._argument(), self._argument()
            return divide(as_scalar(top), as_scalar(bottom))
        if value in BINOMIALS:
            return fn("binomial", as_scalar(self._argument()), as_scalar(self._argument()))
        if value in ("emptyset", "varnothing", "oslash"):
            return ("set", ())
        if value in ("lfloor", "lceil"):
            inner = as_scalar(self._inside(self.sum))
            self.need("r" + value[1:])
            return fn("floor" if value == "lfloor" else "ceil", inner)
        if value == "langle":
            inner = self._inside(self.items)
            self.need("rangle")
            return ("tuple", "(", ")", inner[2] if inner[0] == "list" else (inner,))
        if value == "mathbb" or value == "Bbb":
            name = self._name_in_braces()
            if name in _SETS:
                return ("set_named", name)
        if value.startswith("begin:") and value[6:] in MATRICES:
            return self._matrix(value[6:])
        raise Unreadable(f"the command \\{value}")

    def _matrix(self, kind: str) -> Node:
        rows: list[tuple[Node, ...]] = []
        row: list[Node] = []
        while not self.take(f"end:{kind}"):
            row.append(self._deeper(lambda: self._inside(self.measured)))
            if self.take("&"):
                continue
            rows.append(tuple(row))
            row = []
            if not self.take("\\\\"):
                self.need(f"end:{kind}")
                break
        node = matrix(rows)
        return fn("determinant", *(entries(node))) if kind == "vmatrix" else node


def letters(word: str) -> bool:
    """Return whether a run of letters can be a product: up to three letters, six without a vowel, or in alphabetical order."""
    if word.lower() in _NEVER or len(word) > 6:
        return False
    return len(word) <= 3 or not re.search("[aeiouAEIOU]", word) or word in _ALPHABET
