"""Spellings that the grammar does not know → those that it knows: one regular expression each, linear in the text."""

from __future__ import annotations

import math
import re
from typing import Any

from algorist_grader.algebra.units import number_in_words
from algorist_grader.text import closing_brace

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
_CHOOSE = r"(?:\\(?:mathrm|text)\{([CP])\}|([CP]))"
_CHOICES = (
    re.compile(rf"(?:\{{\}})?[_^]\s*{_NUMERAL}\s*{_CHOOSE}\s*_\s*{_NUMERAL}"),
    re.compile(rf"(?<![a-zA-Z\\])()(C)_\s*{_NUMERAL}\s*\^\s*{_NUMERAL}"),
    re.compile(r"(?<![\d.])(\d{1,4})()([CP])(\d{1,4})(?![\d_(])"),
    re.compile(r"(?<![a-zA-Z\\}\d])n?([CP])(r?)\(\s*(\d{1,4})\s*,\s*(\d{1,4})\s*\)"),
)
_UPSIDE_DOWN = re.compile(rf"(?<![a-zA-Z\\])C\^\s*{_NUMERAL}\s*_\s*{_NUMERAL}")
_POINT = re.compile(r"([ACDMPQ]) *(\([^()]*,[^()]*\))")
_OF_LETTERS = re.compile(
    r"C *\( *([\da-z +-]*[nm][\da-z +-]*),([\da-z +-]+)\)|C_ *\{([\da-z +-]*[nm][\da-z +-]*)\} *\^ *\{?([\da-z +-]+)\}?|C_ *([nm]) *\^ *\{?([\da-z +-]+)\}?"
)
_ARRANGED = re.compile(rf"[PA]_\s*{_NUMERAL}\s*\^\s*{_NUMERAL}")
_ANGLE = re.compile(r"\\ang\s*\{([^{}]*)\}")
_MINUTES = re.compile(
    r"(?<![\d.])(\d{1,3})\s*\^\s*\{?\s*\\circ\s*\}?\s*(\d{1,2})\s*(?:'|\^\s*\{?\s*\\prime\s*\}?)(?!')(?:\s*(\d{1,2})\s*(?:''|\"|\^\s*\{\s*\\prime\s*\\prime\s*\}))?"
)
_NATURAL = re.compile(
    r"[\s,;]*\(?\s*(?:\\(?:text|mbox)\s*\{\s*(?:for|where)\s*\}\s*)?(?P<n>[nkm])\s*\\in\s*(?:\\(?:mathbb|mathbf|Bbb)\s*\{?\s*N\s*\}?|N)\s*"
    r"(?:(?:\^|_)\s*(?:\{\s*)?(?:\*|\+|\\ast)(?:\s*\})?)?\s*\)?$"
)
_EXCEPT = re.compile(r"(.*=.*[^\s,;(])\s*\(\s*([a-zA-Z])\s*(\\neq?(?![a-zA-Z])[^()=]*)\)")
_HALF_LINES = (
    (re.compile(r"(?:\\(?:mathbb|mathbf|Bbb)\s*\{?R\}?|(?<![a-zA-Z\\])R)\s*(?:\^\s*\{?\+\}?|_\s*\{?(?:\+|> *0)\}?)(?!\s*[_^])"), r"(0,\\infty)"),
    (re.compile(r"(?:\\(?:mathbb|mathbf|Bbb)\s*\{?R\}?|(?<![a-zA-Z\\])R)\s*(?:\^\s*\{?-\}?|_\s*\{?(?:-|< *0)\}?)(?!\s*[_^])"), r"(-\\infty,0)"),
    (re.compile(r"\\(?:mathbb|mathbf|Bbb)\s*\{?R\}?\s*(?:_\s*\{(?:\\geq?(?:slant)?|>=)\s*0\}|\^\s*\{?\+\}?\s*_\s*\{?0\}?|_\s*\{?0\}?\s*\^\s*\{?\+\}?)"), r"[0,\\infty)"),
)  # fmt: skip
_MODULO = re.compile(
    r"\s*\(?\s*(?:\\(?:text|mathrm|operatorname)\s*\{\s*\(?\s*mod(?:ulo)?\s*\}?|\\[pb]?mod(?![a-zA-Z])|(?<![a-zA-Z\\])mod(?:ulo)?(?![a-zA-Z]))"
    r"\s*\{?\s*(\d{1,30}|[a-z])(?![a-zA-Z\d])[\s})]*(?=$|[,;]|\\|and|or)"
)
_FLAT = re.compile(r"\\(?:text|mathrm|textrm|mbox)\s*\{([^{}]*)\}")
_INTEGERS = r"(?:\\(?:mathbb|mathbf|mathcal|Bbb)\s*\{?\s*Z\s*\}?|Z|(?:the )?(?:set of )?integers)"
_FOR = r"(?:(?:where|with|for|and|such that|\\forall|\\text) *)?(?:(?:all|any|every|each|some) *)?"
_CLAUSE = re.compile(
    rf"[\s,;:]*\(?\s*{_FOR}(?:(?P<a>[a-zA-Z])\s*\\in\s*{_INTEGERS}|(?P<b>[a-zA-Z])\s+(?:is|be|are)?\s*(?:an?|any|some)?\s*integers?"
    r"|integers?\s*(?:values? of\s*)?(?P<c>[a-zA-Z])|(?P<d>[a-zA-Z])\s*=\s*0\s*,\s*\\pm\s*1\s*(?:,\s*\\pm\s*2\s*)?,\s*\\[lc]?dots)\s*\)?\s*\.?$"
)
_FAMILY = re.compile(
    rf"(?:([a-zA-Z])\s*(?:=|\\in)\s*)?\\\{{(.+?)(?:\\mid|\\vert|\||:)\s*([a-zA-Z])\s*\\in\s*{_INTEGERS}\s*\\\}}",
    re.DOTALL,
)
_BASE = re.compile(
    r"(?:\((\d+)\)|^\{(\d+)\})_|(?<=\d)(?:_\s*\{\s*(?:\\text\s*\{)?\s*\(?([a-z]{3,}|\d+)\)?\s*\}?\s*\}|_\s*\\text\s*\{\s*([a-z]+)\s*\}"
    r"|,?\s*\(?(?:in )?base[- ]([a-z]{3,}|\d+)\)?)$"
)
_TRANSPOSED = re.compile(
    r"(.*[\])}])\s*\^\s*\{?\s*(?:T|\\top|\\(?:mathsf|mathrm|text|intercal)\s*\{?T\}?)\s*\}?", re.DOTALL
)
_ROWS = re.compile(r"\\begin\{(cases|aligned|align\*?|gathered)\}(.*)\\end\{\1\}", re.DOTALL)
_INCHES = re.compile(
    r"(?<=[\d} ])in(?:\.|(?=\s*\^|$))\s*|\\(?:text|mathrm)\s*\{\s*(?:(sq|square)\.?\s*)?in\.?\s*\}\s*"
)


def _choice(match: re.Match[str]) -> str:
    """Return ``C(n, k)`` and its like as a binomial, ``P(n, k)`` as its value; a point as it is written."""
    of, below = (int(n) for n in match.groups() if n and n.isdigit())
    if below > of or ("P" in match.groups() and below > 50):
        return match[0]
    return str(math.perm(of, below)) if "P" in match.groups() else f"\\binom{{{of}}}{{{below}}}"


def several_readings(text: str) -> tuple[str, ...]:
    """Return the two readings of ``P(6,3)`` (arrangements, a point), ``A_6^3`` (arrangements, a power), ``C(2n,n)``; else ()."""
    if text[:1] not in "ACDMPQ" or len(text) > 60:
        return ()
    if choice := _OF_LETTERS.fullmatch(text):
        of, below = (part for part in choice.groups() if part)
        return (f"\\binom{{{of}}}{{{below}}}", text.lstrip("C ") if choice[1] else text)
    if point := _POINT.fullmatch(text):
        number = _CHOICES[3].fullmatch(text)
        return (_choice(number), point[2]) if number and _choice(number) != text else (point[2],)
    if (arranged := _ARRANGED.fullmatch(text)) and int(arranged[2]) <= min(int(arranged[1]), 50):
        return (str(math.perm(int(arranged[1]), int(arranged[2]))), text)
    return ()


def _over_integers(text: str) -> str:
    """Return ``…, where k is an integer`` and ``{… | k ∈ Z}`` with the clause ``, k \\in \\mathbb{Z}``."""
    family = _FAMILY.fullmatch(text)
    if family:
        name = f"{family[1]} = " if family[1] else ""
        return f"{name}{family[2]}, {family[3]} \\in \\mathbb{{Z}}"
    flat = _FLAT.sub(r" \1 ", text)
    clause = _CLAUSE.search(flat)
    head = flat[: clause.start()] if clause else ""
    letter = next((c for c in clause.groups() if c), "") if clause else ""
    if not letter or letter not in re.sub(r"\\[a-zA-Z]+|[a-zA-Z]{3,}", " ", head):
        return text
    return f"{head}, {letter} \\in \\mathbb{{Z}}"


def _base(match: re.Match[str]) -> str:
    digits, spelled = match[1] or match[2], match[3] or match[4] or match[5] or ""
    base = spelled if spelled.isdigit() else number_in_words(spelled)
    return f"{digits}_" if digits else f"_{{{base}}}" if base else match[0]


def _inches(match: re.Match[str]) -> str:
    return f"\\text{{ {'square ' if match[1] else ''}inch}}"


def _rows(match: re.Match[str]) -> str:
    rows = [re.sub(r",?\s*&", " ", row).strip(" ,\n") for row in match[2].split("\\\\")]
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


def _halves_open(text: str) -> str:
    return "\\cup".join(_half_open(part.strip()) if part.strip() else part for part in text.split("\\cup"))


def _following(match: re.Match[str]) -> str:
    """Return ``\\{4,5,6,\\ldots\\}`` as the integers from the first."""
    first, second, third = (int(n) for n in match.groups())
    return (
        f"\\{{n\\in\\mathbb{{Z}}:n\\ge {first}\\}}" if (second, third) == (first + 1, first + 2) else match[0]
    )


def _twice(match: re.Match[str]) -> str:
    """Return ``12 (twelve)`` as 12."""
    return match[1] if str(number_in_words(match[2])) == match[1] else match[0]


def _degrees(match: re.Match[str]) -> str:
    """Return ``24^\\circ 30'`` as degrees alone; 60 minutes and more are none."""
    whole, minutes, seconds = (int(n or 0) for n in match.groups())
    if minutes >= 60 or seconds >= 60:
        return match[0]
    return f"\\frac{{{whole * 3600 + minutes * 60 + seconds}}}{{3600}}^\\circ "


_ONLY_WITH_COMMANDS = (
    ("\\circ", _MINUTES, _degrees),
    ("\\in", _NATURAL, r", \g<n> \\in \\mathbb{N}"),
    ("\\ne", _EXCEPT, r"\1, \2 \3"),
    ("nicefrac", re.compile(r"\\nicefrac"), r"\\frac"),
    ("\\R", re.compile(r"\\R(?![a-zA-Z])"), r"\\mathbb{R}"),
    ("\\\\", re.compile(r"\\\\\s*\[\s*[\d.]+\s*(?:pt|em|ex|mm)\s*\]"), r"\\\\"),
    ("{\\t", re.compile(r"(?<=\d)\s*\{\s*(\\text\s*\{[^{}]*\})\s*\}"), r" \1"),
    ("\\bar", re.compile(r"(?<=[.\d])\\bar\s*(\d)"), r"\\overline{\1}"),
    ("{\\", re.compile(r"\{\s*(\\(?:times|cdot|div))\s*\}"), r" \1 "),
    ("dots", re.compile(r"\\\{\s*(-?\d+)\s*,\s*(-?\d+)\s*,\s*(-?\d+)\s*,\s*\\[lc]?dots\s*\\\}"), _following),
    ("\\over", _OVER, r"\\frac{\1}{\2}"),
    ("\\prime", _PRIME, lambda m: "'" * m[0].count("prime")),
    ("\\root", _ROOT_OF, r"\\sqrt[\1]"),
    ("\\not", _NOT, lambda m: "\\ne " if m[1] == "=" else "\\notin "),
    ("\\begin{", _ROWS, _rows),
    ("frac", _UNIT_FRACTION, r"\\text{\1/\2\3}"),
    ("\\ang", _ANGLE, r"\1^\\circ"),
    ("\\surd", re.compile(r"\\surd(?![a-zA-Z])"), r"\\sqrt"),
    ("\\textdegree", re.compile(r"\\textdegree"), r"^\\circ "),
)


_IT = r"(?:it|they|he|she|there) (?:is|are|does|do|can|has|have)"
_EVERY = r"(?:all |the )*integers"
_ORDERS = (("less|smaller", "<"), ("greater|more|larger", ">"))
_IN_WORDS: tuple[tuple[str, re.Pattern[str], Any], ...] = (
    ("'", re.compile(r"(?<=\d)'(?=\d{3}(?!\d))"), ""),
    ("{:}", re.compile(r"\{:\}"), ":"),
    ("es, ", re.compile(rf"^(yes), {_IT}$", re.IGNORECASE), r"\1"),
    ("o, ", re.compile(rf"^(no), {_IT}(?: not|n't)$", re.IGNORECASE), r"\1"),
    (" is ", re.compile(r"^([a-zA-Z]) is (?=[-\d\\(.])"), r"\1 = "),
    (
        "m",
        re.compile(r"^(?:the |The )?((?:[mM]ax|[mM]in)(?:imum)?)(?: value)? is (?=[-\d\\(.])"),
        r"\\text{\1} = ",
    ),
    *(
        (" than ", re.compile(rf"(?<![a-zA-Z])([a-zA-Z]) (?:is )?(?:{w}) than (?=[-\d\\])"), rf"\1 {s} ")
        for w, s in _ORDERS
    ),
    *(
        ("integers", re.compile(rf"{_EVERY} (?:{w}) than (-?\d+)$"), rf"\\{{n\\in\\mathbb{{Z}}:n{s}\1\\}}")
        for w, s in _ORDERS
    ),
    (
        " except ",
        re.compile(r"^all real numbers (?:x )?except (?:for )?(?:x *= *)?(?=[-\d\\])(.+)$"),
        r"\\mathbb{R}\\setminus\\{\1\\}",
    ),
    *(
        (
            scale[1:],
            re.compile(rf"(?<=\d) *(?:degrees?|°)? *[{scale[0]}{scale[0].lower()}]{scale[1:]}$"),
            rf"^\\circ {scale[0]}",
        )
        for scale in ("Celsius", "Fahrenheit")
    ),
    (" in ", re.compile(r"^(\d+) in (\d+)$"), r"\\frac{\1}{\2}"),
    (" out of ", re.compile(r"^(\d+) out of (\d+)$"), r"\\frac{\1}{\2}"),
    (".", re.compile(r"\b(sq|ft|hrs?|mins?|secs?|lbs?|oz|yds?)\.(?=\s|$)"), r"\1"),
    (")", re.compile(r"^(\d+) *\(([a-z][a-z -]+)\)$"), _twice),
    ("pct", re.compile(r"(?<=\d) ?pct\.?(?![a-zA-Z])"), r"\%"),
    (")", re.compile(r"(?<=[\d}i]) *\(((?:[cm]?m|ft|km|yd)\s*\^\s*\{?[23]\}?)\)$"), r" \\text{\1}"),
)


def respelled(text: str) -> str:
    """Return cleaned text in the grammar's spelling: ``\\over`` is ``\\frac``, a braced list a set, ``]0,1]`` is ``(0,1]``."""
    if "\\" in text:
        for mark, pattern, made in _ONLY_WITH_COMMANDS:
            if mark in text:
                text = pattern.sub(made, text)
        if "\\\\" in text and "\\begin" not in text:
            text = re.sub(r"\s*\\\\\s*", ", ", text)
    if "&=" in text and "\\begin" not in text:
        text = text.replace("&=", "=")
    for mark, pattern, made in _IN_WORDS:
        if mark in text:
            text = pattern.sub(made, text)
    if text.startswith("Rs."):
        text = "Rs " + text[3:]
    if "^" in text:
        text = _LETTER_O.sub(r"^\\circ ", text)
        row = _TRANSPOSED.fullmatch(text)
        text = _column(row[1]) or text if row else text
    if "C" in text or "P" in text:
        text = _UPSIDE_DOWN.sub(r"C_{\2}^{\1}", text)
        for pattern in _CHOICES:
            text = pattern.sub(_choice, text)
    if "R" in text and ("^" in text or "_" in text):
        for pattern, made in _HALF_LINES:
            text = pattern.sub(made, text)
    if "mod" in text:
        text = _MODULO.sub(r"\\pmod{\1}", text)
    if "Z" in text or "integer" in text or "dots" in text:
        text = _over_integers(text)
    if "in" in text:
        text = _INCHES.sub(_inches, text)
    if "U" in text:
        text = _UNION.sub(r"\\cup ", text)
    if "_" in text or "base" in text:
        text = _BASE.sub(_base, text)
    signed = _NEGATIVE.match(text) if text[:1] in "nNmMpP" else None
    if signed:
        text = ("+" if signed[1][0] in "pP" else "-") + text[signed.end() :]
    if "{" in text:
        text = _BRACED_SIGN.sub(r"\1", text)
        bare = _BARE_SET.fullmatch(text)
        if bare and closing_brace(text, text.index("{")) == len(text) - 1:
            text = f"{bare[1]}\\{{{bare[2]}\\}}"
    return _halves_open(text) if text[:1] and text[:1] in "[]" else text
