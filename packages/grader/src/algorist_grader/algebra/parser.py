"""Tokens → tree: plain mathematics and the LaTeX that answers are written in. Recursive descent, bounded depth.

Nothing is evaluated but rational arithmetic of bounded size, and no text is ever given to ``eval`` or ``parse_expr``.
"""

from __future__ import annotations

import re
from fractions import Fraction

from algorist_grader.algebra.names import formula_name, name_between
from algorist_grader.algebra.parser_atoms import BINOMIALS, FRACTIONS, MATRICES, Atoms
from algorist_grader.algebra.tokens import Tokenizer
from algorist_grader.algebra.tree import (
    MINUS,
    Node,
    Unreadable,
    add,
    as_scalar,
    divide,
    is_scalar,
    mul,
    multiplied,
    neg,
    num,
    power,
    scaled_container,
    sym,
    symbols,
)
from algorist_grader.algebra.units import CURRENCIES, NO_UNIT, one_letter_unit, read_unit, with_currency

_AND_OR = ("and", "or", "and/or")
_FACTORS = {*FRACTIONS, *BINOMIALS, *(f"begin:{name}" for name in MATRICES), "lfloor", "lceil", "infty"}
_UNIT = r"(?: (?:m|s|g|h|l|L|N|J|K|V|W|kg|km|cm|mm|mol|Hz|Omega)(?: \^(?: -)? \d)?)"
_LETTER_UNIT = re.compile(rf"{_UNIT}(?:(?: [*/])?{_UNIT})*")


def _joined(first: Node, second: Node) -> Node | None:
    """Return ``5 and 1/3`` as one number, ``2 dollars and 5 cents`` as one quantity; None where they are two answers.

    The quantity is written in the base unit of its dimension, which is the only bare number that it can mean.
    """
    if first[0] == second[0] == "num" and first[1].denominator == 1 and 0 < second[1] < 1:
        return num(first[1] + (second[1] if first[1] > 0 else -second[1])) if first[1] else None
    first, second = (n[2] if n[0] == "maybe" else n for n in (first, second))
    if first[0] == second[0] == "quantity" and first[2][1] == second[2][1] and first[2][0] > second[2][0]:
        total = add([mul([num(n[2][0]), n[1]]) for n in (first, second)])
        return ("quantity", total, (Fraction(1), first[2][1]))
    return None


class Parser(Atoms):
    """The outer half: lists, unions, relations, ratios, units, sums, products."""

    # -- lists, unions, relations --------------------------------------------------------------------------------
    def whole(self) -> Node:
        """Parse everything; nothing may be left over."""
        if not self.tokens:
            raise Unreadable("empty")
        node = self.items()
        if self.peek()[0] != "end":
            raise Unreadable(f"unexpected {self.peek()[1]!r}")
        return node

    def _word(self, *words: str) -> str:
        """Step over one of these words and return it; "" at another token."""
        kind, value = self.peek()
        return str(self.step().value) if kind == "text" and value in words else ""

    def items(self) -> Node:
        nodes = [self.union()]
        words: set[str] = set()
        one_number = self._may_be_decimal()
        while True:
            if word := self._word(*_AND_OR):
                words.add(word)
            elif self.take(",", ";"):
                words |= {",", self._word("and", "or")}
                if self.sees("ldots", "dots", "cdots"):
                    raise Unreadable("an open list")
            else:
                break
            nodes.append(self.union())
        if len(nodes) == 1:
            return nodes[0]
        measures = words == {",", ""} and nodes[0][0] == nodes[1][0] == "quantity"  # 2 hours, 30 minutes
        if (words == {"and"} or measures) and len(nodes) == 2 and (joined := _joined(*nodes)):
            return ("either", (joined, ("list", ",", tuple(nodes))))
        word = "or" if "or" in words or "and/or" in words else "" if one_number and len(nodes) == 2 else ","
        return ("list", word, tuple(nodes))

    def _may_be_decimal(self) -> bool:
        """Return whether ``12,5`` is here: two numbers, or one with a decimal comma."""
        before, after = (
            self.tokens[at] if at < len(self.tokens) else None for at in (self.at - 1, self.at + 1)
        )
        if self.inner or not self.sees(",") or before is None or after is None or after.space:
            return False
        if "/" in (
            token.text for token in (*self.tokens[: self.at - 1][-1:], *self.tokens[self.at + 2 :][:1])
        ):
            return False  # 1/3,1/2
        return before.kind == after.kind == "num" and (before.text.replace(".", "") + after.text).isdigit()

    def union(self) -> Node:
        parts = [self.relation()]
        operator = ""
        while sign := self.take("cup", "cap", "setminus", "bigcup", "backslash"):
            name = {"bigcup": "cup", "backslash": "setminus"}.get(sign, sign)
            if operator not in ("", name):
                raise Unreadable("mixed set operations")
            operator = name
            parts.append(self.relation())
        if len(parts) == 1:
            return parts[0]
        kind = "union" if operator == "cup" else operator
        if parts[0][0] == "rel" and parts[0][1] == ("in",):  # x ∈ A ∪ B
            name, first = parts[0][2]
            return ("rel", ("in",), (name, (kind, (first, *parts[1:]))))
        return (kind, tuple(parts))

    def relation(self) -> Node:
        operators: list[str] = []
        if self.peek()[0] == "rel" and self.peek()[1] in ("=", "~", "=="):  # "= 5", "≈ 5"
            self.step()
        name = formula_name(self.tokens, self.at) if self.has_relation else None
        if name is not None:
            terms: list[Node] = [("formula", name[0])]
            while self.at < name[1] - 1:
                self.step()
        else:
            terms = [self.ratio()]
        while self.peek()[0] == "rel":
            operators.append(str(self.step().value))
            start = self.at
            terms.append(self.ratio())
        if not operators:
            return terms[0]
        if operators == ["="] and name is None and not symbols(terms[0]):  # 5 = |AB|
            right = name_between(self.tokens, start, self.at)
            terms = [("formula", right), terms[0]] if right else terms
        return ("rel", tuple(operators), tuple(terms))

    def ratio(self) -> Node:
        terms = [self.measured()]
        while self.take(":"):
            terms.append(self.measured())
        if self.take("pmod"):
            terms[-1] = ("residue", as_scalar(terms[-1]), as_scalar(self._argument()))
        elif len(terms) == 1 and is_scalar(terms[0]) and self._word("to"):  # 3 to 4
            terms.append(self.measured())
        return terms[0] if len(terms) == 1 else ("ratio", tuple(terms))

    def measured(self) -> Node:
        """Parse an expression with the unit or the words that may follow it, or a currency before it."""
        negative, currency = self._currency()
        kind, value = self.peek()
        alone = self.at == 0 or self.tokens[self.at - 1].kind != "rel"
        whole_run = kind == "word" and str(value).isupper() and alone and self._item_ends(1)
        if kind in ("text", "word") and (whole_run or not self.is_product()):
            return self._words()
        start = self.at
        node = self.sum()
        if self.take("over"):
            node = divide(as_scalar(node), as_scalar(self.sum()))
        if negative:
            node = self._with_sign("-", node)
        spelled = self._letter_unit()
        unit = with_currency(currency, spelled or self._unit())
        if not unit:
            return node
        if not is_scalar(node):
            raise Unreadable(f"words after it: {unit}")
        quantity = read_unit(node, unit)
        if self.peek()[0] == "num":  # 1 dollar 69 cents
            return self.attempt(lambda: _joined(quantity, self.measured())) or quantity
        if spelled:
            return self._maybe_unit(start, node, quantity)
        if re.fullmatch("[a-zA-Z]{2,3}", unit) and quantity[0] == "quantity":  # 2mg may be 2·m·g
            return ("maybe", mul([node, *(sym(letter) for letter in unit)]), quantity)
        return quantity

    def _currency(self) -> tuple[bool, str]:
        """Take a currency before a number; return whether a minus stood before it, and its name."""
        ahead = 1 if self.sees("-") else 0
        kind, value = self.peek(ahead)
        united = kind == "word" and value in ("US", "USD") and self.peek(ahead + 1) == ("op", "$")
        if united or (kind == "op" and value in ("$", "#")):
            name = "dollars"
        elif (
            kind in ("word", "text") and str(value).lower() in CURRENCIES and self.peek(ahead + 1)[0] == "num"
        ):
            name = str(value)
        else:
            return False, ""
        for _ in range(ahead + 1 + united):
            self.step()
        return ahead == 1, name

    def _item_ends(self, ahead: int) -> bool:
        kind, value = self.peek(ahead)
        return (
            kind == "end"
            or (kind == "op" and value in (",", ";", ")", "]", "\\}"))
            or value in ("and", "or")
            or (kind == "num" and self.tokens[self.at + ahead].space)  # 3 h 30 min
        )

    def _letter_unit(self) -> str:
        """Take a unit of single letters up to the end of the item, ``m`` or ``m/s^2``, and return it; else return ""."""
        if not self._before_letter_unit():
            return ""
        spelled: list[str] = []
        while not self._item_ends(0):
            token = self.step()
            if token.text not in "{}":
                spelled.append((" " if token.space else "") + token.text)
        return re.sub(r" ?([*/^-]) ?", r"\1", "".join(spelled)).strip()

    def _before_letter_unit(self) -> bool:
        """Return whether only units of one letter follow a number, after a blank or with a fraction stroke: ``5 m``, ``5m/s``."""
        kind, value = self.peek()
        if self.inner or self.units_are_letters or kind != "sym" or one_letter_unit(str(value)) is None:
            return False
        spelled, ahead = "", 0
        while not self._item_ends(ahead) and ahead < 16:
            spelled += f" {self.tokens[self.at + ahead].text}"
            ahead += 1
        return bool(_LETTER_UNIT.fullmatch(re.sub(r" [{}]", "", spelled))) and (
            self.tokens[self.at].space or "/" in spelled
        )

    def _maybe_unit(self, start: int, node: Node, quantity: Node) -> Node:
        """Return both readings of ``5 m``: the product of 5 and m, and five metres."""
        self.units_are_letters = True
        product = as_scalar(self.again(start, self.sum))
        self.units_are_letters = False
        return product if symbols(node) else ("maybe", product, quantity)

    def _unit(self) -> str:
        parts: list[str] = []
        while True:
            kind, value = self.peek()
            words = kind in ("text", "word") and value not in (*_AND_OR, "to")
            joins = (
                parts and kind == "op" and value in ("/", "*") and self.peek(1)[0] in ("text", "word", "sym")
            )
            if words or joins or (parts and kind == "sym") or self.sees("%", "degree"):
                parts.append(str(value))
            elif self.sees("$"):
                parts.append("dollars")
            elif parts and kind == "op" and value in ("^", "{", "}", "-"):
                parts.append(str(value) if value not in "{}" else "")
            elif parts and kind == "num" and parts[-1] in ("^", "", "-"):
                parts.append(str(value[1]))  # type: ignore[index]
            else:
                return " ".join(p for p in parts if p)
            self.step()

    def _words(self) -> Node:
        parts: list[str] = []
        while self.peek()[0] in ("text", "word", "sym") or (
            parts and self.sees("-", "'", "!", "(", ")", ".")
        ):
            kind, value = self.peek()
            if kind == "text" and value in _AND_OR:
                break
            parts.append(str(self.step().value))
        if self.peek()[0] == "rel" and self.peek()[1] == "=" and len(parts) <= 3:  # "area = 5"
            if NO_UNIT & {word for part in parts for word in part.lower().split()}:
                raise Unreadable("a name with a negation or a hedge")
            return ("name", " ".join(parts).lower())
        return ("text", " ".join(parts))

    # -- sums and products ---------------------------------------------------------------------------------------
    def sum(self) -> Node:
        terms = [self._deeper(self._signed)]
        while sign := self.take("+", "-", "pm", "mp"):
            term = self._deeper(self.product)
            if sign == "-" and term[0] == "set" and terms[0][0] == "set_named" and len(terms) == 1:
                terms[0] = ("setminus", (terms[0], term))
            else:
                terms.append(self._with_sign(sign, term))
        if len(terms) == 1:
            return terms[0]
        if all(is_scalar(t) for t in terms):
            return add(terms)
        raise Unreadable("a sum of things that are not numbers")

    def _signed(self) -> Node:
        sign = self.take("+", "-", "pm", "mp")
        if not sign:
            return self.product()
        if sign == "+" and self.peek()[1] == "/" and self.peek(1)[1] == "-":  # "+/-"
            sign, _, _ = "pm", self.step(), self.step()
        signed_again = self.sees("-") and sign in "+-"
        return self._with_sign(sign, self._deeper(self._signed if signed_again else self.product))

    @staticmethod
    def _with_sign(sign: str, term: Node) -> Node:
        if not is_scalar(term):
            if sign == "-" and term[0] == "base":
                return ("base", f"-{term[1]}", term[2])
            if sign == "+":
                return term
            if sign == "-" and term[0] == "quantity":
                return ("quantity", neg(as_scalar(term[1])), term[2])
            if sign == "-" and term[0] in ("tuple", "matrix"):
                return scaled_container(MINUS, term)
            raise Unreadable("a sign before something that is not a number")
        if sign in ("pm", "mp"):
            return mul([sym(sign), term])
        return neg(term) if sign == "-" else term

    def product(self) -> Node:
        factors = [self.power()]
        last_is_number = self.tokens[self.at - 1].kind == "num"
        while True:
            kind, value = self.peek()
            if self.take("*"):
                factors.append(self._factor())
            elif kind == "op" and value == "/" and self.peek(1) != ("op", "/"):
                self.step()
                factors.append(power(as_scalar(self._factor()), MINUS))
            elif self._before_letter_unit():
                break
            elif self._starts_factor():
                mixed = self._mixed(factors, last_is_number)
                if mixed:
                    continue
                products = self.tokens[self.at - 1].value == self.peek(1)[1] == "!" or factors == [
                    sym("i")
                ]  # 3!7!, i2
                products = products or self._after_a_power() or self._before_power(factors)
                if kind == "num" and (value[0] == 1 or not products):  # type: ignore[index]
                    raise Unreadable("two numbers side by side")
                factors.append(self.power())
            else:
                break
            last_is_number = False
        return factors[0] if len(factors) == 1 else multiplied(factors)

    def _before_power(self, factors: list[Node]) -> bool:
        """Return whether a number here is raised and no part of what is before it: ``n2^{n-1}``, ``(n+1)2^n``, ``k 10^6``."""
        if self.peek(1) != ("op", "^") or factors[-1][0] == "num":
            return False
        if self.tokens[self.at].space or self.tokens[self.at - 1].value in (")", "]", "}", "!"):
            return True
        group = self.peek(2) == ("op", "{")
        exponent = self.tokens[self.at + 2 : self.at + (14 if group else 3)]
        ends = next((i for i, token in enumerate(exponent) if token.value == "}"), len(exponent))
        return any(token.kind == "sym" for token in exponent[:ends])

    def _after_a_power(self) -> bool:
        """Return whether an exponent ends here: ``2^3 5^2``, ``2^{10} 5``."""
        at, depth = self.at - 1, 0
        while at > 0 and self.at - at < 12:
            value = self.tokens[at].value
            depth += (value == "}") - (value == "{")
            if depth == 0 or value == "circ":
                return depth == 0 and self.tokens[at - 1][:2] == ("op", "^")
            at -= 1
        return False

    def _factor(self) -> Node:
        sign = self.take("-", "+")
        return self._after_sign(sign, self._factor) if sign else self.power()

    def _mixed(self, factors: list[Node], last_is_number: bool) -> bool:
        """Read ``3\\frac{1}{2}`` and ``3 1/2`` as sums; say whether one stood here."""
        whole = len(factors) == 1 and factors[0][0] == "num" and factors[0][1].denominator == 1
        if not (last_is_number and whole) or "." in self.tokens[self.at - 1].value[1]:  # type: ignore[index]
            return False
        part = self.attempt(self._proper_fraction)
        if part:
            factors[0] = num(factors[0][1] + part[1])
        return part is not None

    def _proper_fraction(self) -> Node | None:
        kind, value = self.peek()
        part: Node | None = None
        if kind == "cmd" and value in FRACTIONS:
            part = self.power()
        elif (
            kind == "num"
            and self.peek(1) == ("op", "/")
            and self.peek(2)[0] == "num"
            and self.tokens[self.at].space
        ):
            top, _, bottom = self.step().value, self.step(), self.step().value
            part = num(top[0] / bottom[0]) if bottom[0] else None  # type: ignore[index]
        return part if part and part[0] == "num" and 0 < part[1] < 1 else None

    def _starts_factor(self) -> bool:
        kind, value = self.peek()
        if kind in ("num", "sym", "fn"):
            return True
        if kind == "op":
            return value in ("(", "[", "{") or (value == "|" and not self.bars)
        if kind == "word":
            return self.is_product()
        return kind == "cmd" and value in _FACTORS


def parse(text: str) -> Node:
    """Return the tree of cleaned text; where names of units make no sense, they are read as products of letters.

    Raises:
        Unreadable: The text is not an answer that the grammar knows.
    """
    tokens = Tokenizer(text).run()
    try:
        return Parser(tokens.copy()).whole()
    except Unreadable as error:
        if error.code == "too_large":
            raise
        try:
            return Parser(tokens, units_are_letters=True).whole()
        except Unreadable:
            raise error from None
