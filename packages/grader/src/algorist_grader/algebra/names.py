"""Left sides that only name what was asked: ``f'(x) =``, ``|AB| =``, ``\\angle A =``, ``(x,y) =``, ``S_1:S =``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from algorist_grader.algebra.tokens import Token

_LETTER = r"(?:[A-Za-z]|<\w+>|\w+\(\w\))"
_SUBSCRIPT = r"(?:_(?:\w|<\w+>|\{[\w,<>]+\}))?"
_NAME = rf"(?:{_LETTER}{_SUBSCRIPT}'*|[A-Z]{{2,}})"
_ARGUMENTS = r"\((?:[^()]|\([^()]*\))*\)"
_DERIVATIVE = re.compile(
    rf"[dt]?frac\{{d(?P<y>{_LETTER})?\}}\{{d(?P<x>{_LETTER})\}}(?P<f>{_LETTER})?(?P<of>{_ARGUMENTS})?|d(?P<z>{_LETTER})/d(?P<t>{_LETTER})"
)
_PRIMES = re.compile(rf"(?P<f>{_LETTER})(?P<p>'+)(?P<x>{_ARGUMENTS})?")
_PURE = re.compile(
    rf"m?\{{?angle\{{?[A-Z<>\w]+\}}?\}}?|\{{?triangle[A-Z]+\}}?|{_LETTER}_\{{triangle[A-Z]+\}}|{_LETTER}triangle[A-Z]+|\|(?:[A-Z]{{1,3}}|[zwuv])\||[A-Z]{{2,}}"
    rf"|[fghFGHPE](?:\^\{{?-1\}}?)?{_ARGUMENTS}|(?!(?:e|i|<pi>)\(){_LETTER}{_SUBSCRIPT}\((?:{_NAME}|\d+)(?:,(?:{_NAME}|\d+))*\)|E\[[^\[\]]*\]"
    rf"|\({_LETTER}circ{_LETTER}\){_ARGUMENTS}|\({_NAME}(?:,{_NAME})+\)|{_NAME}(?::{_NAME})+|[A-Z]\^\{{?-1\}}?|d{_LETTER}"
    rf"|{_LETTER}\({_NAME}(?:,{_NAME})+\)|(?:det|dim|rank|tr|gcd|lcm|max|min|Var|Cov|Pr|sup|inf|deg|area|vol)(?:{_ARGUMENTS}|{_NAME})"
    rf"|mathbb\{{[EP]\}}(?:{_ARGUMENTS}|\[[^\[\]]*\])|\|(?:[A-Z]|cup|cap)+\||{_LETTER}(?:\({_LETTER}\))?_\{{?(?:max|min)\}}?|{_LETTER}\^\{{?\*\}}?|lim_.+"
)  # fmt: skip
_MOST = 40


def formula_name(tokens: Sequence[Token], start: int) -> tuple[str, int] | None:
    """Return the name before the next equals sign and the place after the sign, or None at an expression.

    Plain letters (``x =``) and words (``area =``) are not looked for here: the grammar reads them itself.
    """
    depth, bars = 0, False
    spelled: list[str] = []
    for place in range(start, min(len(tokens), start + _MOST)):
        token = tokens[place]
        if token.kind == "rel" and depth == 0 and not bars:
            if token.value != "=":
                return None
            name = _named("".join(spelled))
            if name and name.isupper() and not any(t.kind == "num" for t in tokens[place:]):
                return None  # PV = nRT is an equation
            return (name, place + 1) if name else None
        if token.kind == "op":
            depth += {"(": 1, "[": 1, "{": 1, "\\{": 1, ")": -1, "]": -1, "}": -1, "\\}": -1}.get(
                str(token.value), 0
            )
            bars ^= token.value == "|" and depth == 0
        if token.value in (",", ";") and depth == 0:
            return None
        spelled.append(_spelled(token))
    return None


def name_between(tokens: Sequence[Token], start: int, end: int) -> str | None:
    """Return the name that the tokens from one place to another spell, or None: ``5 = |AB|``."""
    return _named("".join(map(_spelled, tokens[start:end]))) if end - start <= _MOST else None


def _spelled(token: Token) -> str:
    text = token.text
    return f"<{text}>" if token.kind == "sym" and len(text) > 1 and "(" not in text else text


def _named(text: str) -> str | None:
    """Return one spelling of a name, or None; ``f'(x)`` and ``dy/dx`` are ``y'/x``."""
    if match := _DERIVATIVE.fullmatch(text):
        letter = match["y"] or match["f"] or match["z"] or "y"
        of = "" if match["f"] else match["of"] or ""
        return f"{'y' if letter == 'f' else letter}'/{match['x'] or match['t']}{of}"
    if match := _PRIMES.fullmatch(text):
        of = f"/{match['x'][1:-1]}" if match["x"] else ""
        return ("y" if match["f"] == "f" else match["f"]) + match["p"] + of
    if not _PURE.fullmatch(text):
        return None
    if text.startswith(("m{angle", "mangle")):
        text = text[1:]
    return re.sub(r"[{}|]", "", text)
