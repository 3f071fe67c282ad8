"""Spellings that the grammar does not know → those that it knows: one regular expression each, linear in the text."""

from __future__ import annotations

import re

from algorist.grading.algebra.units import number_in_words
from algorist.grading.text import closing_brace

_BARE_SET = re.compile(r"((?:[a-zA-Z]\s*(?:=|\\in(?![a-zA-Z]))\s*)?)\{(?=.*,)(.*)\}", re.DOTALL)
_PRIME = re.compile(r"\^\s*(?:\{\s*(?:\\prime\s*)+\}|\\prime(?![a-zA-Z]))")
_OVER = re.compile(r"\{([^{}\\]*)\\over(?![a-zA-Z])([^{}]*)\}")
_UNIT_FRACTION = re.compile(
    r"\\[dt]?frac\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}(\^\{?\d\}?)?\s*\}"
)
_ROOT_OF = re.compile(r"\\root\s*\{?(\w+)\}?\s*\\of(?![a-zA-Z])")
_NOT = re.compile(r"\\not\s*(=|\\in(?![a-zA-Z]))")
_LETTER_O = re.compile(r"(?<=\d)\s*\^\s*(?:o(?![a-zA-Z])|\{\s*(?:o|\\(?:text|mathrm|rm)\s*\{?o\}?)\s*\})")
_BRACED_SIGN = re.compile(r"(?<![a-zA-Z])\{([+-])\}")
_NEGATIVE = re.compile(r"(negative|minus|positive) +(?=[\d.]|\\[dt]?frac|inf|\\inf)", re.IGNORECASE)
_UNION = re.compile(r"(?<=[)\]}])\s*U\s*(?=[(\[]|\\\{)")
_NUMERAL = r"\{?(\d{1,4})\}?"
_COMBINATION = re.compile(
    rf"(?:\{{\}})?_\s*{_NUMERAL}\s*(?:\\(?:mathrm|text)\{{C\}}|C)\s*_\s*{_NUMERAL}"
    rf"|(?:\{{\}})?\^\s*{_NUMERAL}\s*(?:\\(?:mathrm|text)\{{C\}}|C)\s*_\s*{_NUMERAL}"
    rf"|(?<![a-zA-Z\\])C_\s*{_NUMERAL}\s*\^\s*{_NUMERAL}|(?<![a-zA-Z\\])C\^\s*{_NUMERAL}\s*_\s*{_NUMERAL}"
    r"|(?<![\d.])(\d{1,4})C(\d{1,4})(?![\d_])"
)
_BASE = re.compile(r"\((\d+)\)_|(?<=\d)_\s*\{\s*(?:\\text\s*\{)?\s*([a-z]+)\s*\}?\s*\}(?=$)")
_TRANSPOSED = re.compile(
    r"(.*[\])}])\s*\^\s*\{?\s*(?:T|\\top|\\(?:mathsf|mathrm|text|intercal)\s*\{?T\}?)\s*\}?", re.DOTALL
)
_ROWS = re.compile(r"\\begin\{(cases|aligned|align\*?|gathered)\}(.*)\\end\{\1\}", re.DOTALL)
_INCHES = re.compile(
    r"(?<=[\d} ])in(?:\.|(?=\s*\^|$))\s*|\\(?:text|mathrm)\s*\{\s*(?:(sq|square)\.?\s*)?in\.?\s*\}\s*"
)


def _combination(found: re.Match[str]) -> str:
    numbers = [n for n in found.groups() if n is not None]
    of, chosen = reversed(numbers) if found[7] else numbers
    return f"\\binom{{{of}}}{{{chosen}}}"


def _base(found: re.Match[str]) -> str:
    base = number_in_words(found[2]) if found[2] else None
    return f"{found[1]}_" if found[1] else f"_{{{base}}}" if base else found[0]


def _inches(found: re.Match[str]) -> str:
    return f"\\text{{ {'square ' if found[1] else ''}inch}}"


def _rows(found: re.Match[str]) -> str:
    rows = [row.replace("&", " ").strip(" ,\n") for row in found[2].split("\\\\")]
    return ", ".join(row for row in rows if row)


def _column(text: str) -> str:
    """Return the column that a row or the row that a column becomes; "" where the matrix has several of both."""
    if text[0] in "([":
        return text if "," in text else ""
    if not text.startswith("\\begin{") or ("\\\\" in text and "&" in text):
        return ""
    return text.replace("\\\\", "&") if "\\\\" in text else text.replace("&", "\\\\")


def _half_open(text: str) -> str:
    """Return ``]a,b[`` with the brackets that the other countries write; anything else as it is."""
    if text[0] not in "[]" or text[-1] not in "[]" or not (text[0] == "]" or text[-1] == "["):
        return text
    inside = text[1:-1]
    if inside.count(",") + inside.count(";") != 1 or set(inside) & set("[]"):
        return text
    return ("(" if text[0] == "]" else "[") + inside + (")" if text[-1] == "[" else "]")


_ONLY_WITH_COMMANDS = (
    ("\\over", _OVER, r"\\frac{\1}{\2}"),
    ("\\prime", _PRIME, lambda m: "'" * m[0].count("prime")),
    ("\\root", _ROOT_OF, r"\\sqrt[\1]"),
    ("\\not", _NOT, lambda m: "\\ne " if m[1] == "=" else "\\notin "),
    ("\\begin{", _ROWS, _rows),
    ("frac", _UNIT_FRACTION, r"\\text{\1/\2\3}"),
)


def respelled(text: str) -> str:
    """Return cleaned text in the grammar's spelling: ``\\over`` is ``\\frac``, a braced list a set, ``]0,1]`` is ``(0,1]``."""
    if "\\" in text:
        for mark, pattern, made in _ONLY_WITH_COMMANDS:
            if mark in text:
                text = pattern.sub(made, text)
        if "\\surd" in text:
            text = re.sub(r"\\surd(?![a-zA-Z])", r"\\sqrt", text)
        if "\\textdegree" in text:
            text = text.replace("\\textdegree", "^\\circ ")
    if text.startswith("Rs."):
        text = text.replace("Rs.", "Rs ", 1)
    if "^" in text:
        text = _LETTER_O.sub(r"^\\circ ", text)
        row = _TRANSPOSED.fullmatch(text)
        text = _column(row[1]) or text if row else text
    if "C" in text:
        text = _COMBINATION.sub(_combination, text)
    if "in" in text:
        text = _INCHES.sub(_inches, text)
    if "U" in text:
        text = _UNION.sub(r"\\cup ", text)
    if "_" in text:
        text = _BASE.sub(_base, text)
    signed = _NEGATIVE.match(text) if text[:1] in "nNmMpP" else None
    if signed:
        text = ("+" if signed[1][0] in "pP" else "-") + text[signed.end() :]
    if "{" in text:
        text = _BRACED_SIGN.sub(r"\1", text)
        bare = _BARE_SET.fullmatch(text)
        if bare and closing_brace(text, text.index("{")) == len(text) - 1:
            text = f"{bare[1]}\\{{{bare[2]}\\}}"
    return _half_open(text) if text[:1] and text[:1] in "[]" else text
