"""Cleaned text → tokens. One regular expression, no backtracking between alternatives, at most ``MAX_TOKENS``."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from algorist_grader.algebra.functions import FUNCTIONS
from algorist_grader.algebra.tree import Unreadable
from algorist_grader.algebra.units import is_symbol_unit
from algorist_grader.numeric import MAX_DIGITS, MAX_EXPONENT, period_of, repeating
from algorist_grader.text import closing_brace

MAX_TOKENS = 600

_UNSPELLED = {"deg", "factorial", "double_factorial", "binomial", "determinant"}
SPELLED = (FUNCTIONS.keys() - _UNSPELLED) | {
    "asin",
    "acos",
    "atan",
    "lg",
    "exp",
    "cis",
    "sqrt",
    "cbrt",
    "det",
}
GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi varphi"
    " chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar".split()
)
RELATIONS = {
    "=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "==": "=", "!=": "!=", "=<": "<=", "\\le": "<=", "\\leq": "<=", "\\leqslant": "<=",
    "\\ge": ">=", "\\geq": ">=", "\\geqslant": ">=", "\\lt": "<", "\\gt": ">", "\\ne": "!=", "\\neq": "!=", "\\approx": "~", "\\sim": "~",
    "\\in": "in", "\\equiv": "==", "\\simeq": "~", "\\cong": "~", "\\notin": "notin", "\\to": "to", "\\mid": "mid", "\\propto": "prop",
    "\\Rightarrow": "to", "\\rightarrow": "to", "\\implies": "to", "\\iff": "to", "\\subset": "subset", "\\subseteq": "subseteq",
}  # fmt: skip
_TEXTS = frozenset(
    "text textrm textbf textit textsf texttt textnormal mbox hbox emph mathrm operatorname mathsf mathit".split()
)
_GROUPS = frozenset(
    "mathbf boldsymbol bm mathcal vec overrightarrow hat widehat boxed fbox ensuremath underline mathop".split()
)
_BARS = frozenset("overline bar tilde widetilde dot ddot".split())
"""Marks that make another letter of a letter; over two capitals a bar only says that they are a segment."""

_ONE_LETTER = re.compile(r"\s*([a-zA-Z])(?![a-zA-Z])")
_ESCAPED = {**{f"\\{sign}": sign for sign in "%|$#_&"}, **{sign: sign for sign in ("\\{", "\\}", "\\\\")}}
_LOGIC = {"lor": "or", "vee": "or", "land": "and", "wedge": "and"}
_CURRENCIES = {"pounds": "sterling", "euro": "euro", "yen": "yen", "texteuro": "euro"}
_OPENING = ("lbrace", "lparen", "langle", "lfloor", "lceil", "lbrack")
_CLOSING = ("rbrace", "rparen", "rangle", "rfloor", "rceil", "rbrack")
_PLAIN = {
    "lbrace": "\\{", "rbrace": "\\}", "lvert": "|", "rvert": "|", "vert": "|", "degree": "degree", "colon": ":", "lparen": "(",
    "rparen": ")", "lbrack": "[", "rbrack": "]", "times": "*", "cdot": "*", "ast": "*", "div": "/",
}  # fmt: skip
_COMMANDS = {
    **{name: ("op", sign) for name, sign in _PLAIN.items()},
    **{name: ("word", currency) for name, currency in _CURRENCIES.items()},
    **{name: ("text", word) for name, word in _LOGIC.items()},
    **{name: ("fn", name) for name in SPELLED},
    **{name: ("sym", name.removeprefix("var")) for name in (*GREEK, "infty")},
    **{name[1:]: ("rel", sign) for name, sign in RELATIONS.items() if name[0] == "\\"},
}
"""Command → kind and value of its token."""

_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<repeat>\d*\.\d*(?:\\overline\s*\{\s*\d+\s*\}|\\bar\s*\{\s*\d+\s*\}|\\overline\s*\d|\\dot\s*\{\s*\d\s*\}|\(\d+\)(?!\s*[\d(a-zA-Z])))
    |(?P<dots>\d*\.\d{3,}\s*(?:\.\.\.|\\ldots|\\dots|\\cdots))
    |(?P<grouped>[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?:\.\d+)?)
    |(?P<number>(?:\d+(?:\.\d+|\.(?!\.))?|\.\d+)(?:[eE][+-]?\d+(?![a-zA-Z]))?)
    |(?P<command>\\[a-zA-Z]+)
    |(?P<escaped>\\.)
    |(?P<relation><=|>=|==|!=|=<|[<>=])
    |(?P<star>\*\*)
    |(?P<word>[a-zA-Z]+)
    |(?P<sign>[-+*/^_!%'|,;:(){}\[\]&$])""",
    re.VERBOSE,
)


class Token(NamedTuple):
    """``kind`` is one of ``num sym fn text word rel op cmd``; ``space`` says that white space stood before it."""

    kind: str
    value: object
    space: bool = False

    @property
    def text(self) -> str:
        """The token as it was written."""
        return str(self.value[1] if self.kind == "num" else self.value)  # type: ignore[index]


def _number(text: str) -> tuple[Fraction, str]:
    body, _, power = text.lower().partition("e")
    if len(body) > MAX_DIGITS or len(power) > 5 or (power and abs(int(power)) > MAX_EXPONENT):
        raise Unreadable("a number with too many digits", "too_large")
    return Fraction(body.replace(",", "")) * Fraction(10) ** int(power or 0), text


def _repeat(text: str) -> tuple[Fraction, str]:
    whole, _, rest = text.partition(".")
    before = re.match(r"\d*", rest)[0]  # type: ignore[index]
    return repeating("", whole, before, "".join(c for c in rest[len(before) :] if c.isdigit())), ""


def _dotted(text: str) -> tuple[Fraction, str]:
    whole, _, rest = text.partition(".")
    digits = re.match(r"\d*", rest)[0]  # type: ignore[index]
    split = period_of(digits)
    if split is None:
        raise Unreadable("a decimal cut off without a period")
    return repeating("", whole, *split), ""


_NUMBERS = {"number": _number, "grouped": _number, "repeat": _repeat, "dots": _dotted}
"""Readers of a number's value, and of the rest of its spelling: digits that ``\\frac12`` may divide."""


class Tokenizer:
    """Reads cleaned text; nesting of groups is bounded by the length of the text, not by recursion."""

    def __init__(self, text: str, depth: int = 0) -> None:
        self.text = text
        self.tokens: list[Token] = []
        self.depth = depth

    def run(self) -> list[Token]:
        """Return the tokens.

        Raises:
            Unreadable: A character or command that no answer has, too many tokens, an unclosed group.
        """
        position, space = 0, False
        text = self.text
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise Unreadable(f"the character {text[position]!r}")
            kind, symbol = match.lastgroup or "", match[0]
            position = match.end()
            if kind == "space":
                space = True
                continue
            if kind == "grouped" and self.depth:  # (1,200) is a pair
                symbol = symbol.partition(",")[0]
                position = match.start() + len(symbol)
                kind = "number"
            position = self._take(kind, symbol, position, space)
            space = False
            if len(self.tokens) > MAX_TOKENS:
                raise Unreadable("too long", "too_large")
        return self.tokens

    def _put(self, kind: str, value: object, space: bool) -> None:
        self.tokens.append(Token(kind, value, space))

    def _take(self, kind: str, text: str, position: int, space: bool) -> int:
        if kind in _NUMBERS:
            self._put("num", _NUMBERS[kind](text), space)
        elif kind == "relation":
            self._put("rel", RELATIONS[text], space)
        elif kind == "star":
            self._put("op", "^", space)
        elif kind == "word":
            self._word(text, space)
        elif kind == "escaped":
            self._escaped(text, space)
        elif kind == "command":
            return self._command(text, position, space)
        else:
            self._sign(text, space)
        return position

    def _sign(self, text: str, space: bool) -> None:
        if text in "([":
            self.depth += 1
        elif text in ")]":
            self.depth = max(0, self.depth - 1)
        elif text == "$":
            raise Unreadable("a dollar sign inside")
        self._put("op", text, space)

    def _escaped(self, text: str, space: bool) -> None:
        if text not in _ESCAPED:
            raise Unreadable(f"the command {text}")
        self.depth += {"\\{": 1, "\\}": -1}.get(text, 0)
        self._put("op", _ESCAPED[text], space)

    def _word(self, text: str, space: bool) -> None:
        lower = text.lower()
        if len(text) == 1:
            self._put("sym", text, space)
        elif text in ("min", "sec") and self._after_a_number():
            self._put("word", text, space)
        elif text in SPELLED or (text in ("Sin", "Cos", "Tan", "Log", "Ln", "Sqrt")):
            self._put("fn", lower, space)
        elif text in ("Theta", "Omega"):
            self._put("sym", text, space)
        elif lower in ("pi", "theta", "alpha", "beta", "gamma", "lambda", "phi", "omega", "sigma", "delta"):
            self._put("sym", lower, space)
        elif lower in ("inf", "infty", "infinity", "oo"):
            self._put("sym", "infty", space)
        elif text in ("and", "or", "to", "and/or"):
            self._put("text", text, space)
        elif (
            text.startswith(("sqrt", "pi", "sin", "cos", "tan", "ln", "log"))
            and len(text) <= 5
            and text[-1].isalpha()
            and len(text) - len(text.rstrip("xyzabntk")) == 1
        ):
            self._word(text[:-1], space)
            self._put("sym", text[-1], False)
        else:
            self._put("word", text, space)

    def _after_a_number(self) -> bool:
        last = self.tokens[-1] if self.tokens else Token("op", "")
        if last.value in ("*", "/") and len(self.tokens) > 1:
            return self.tokens[-2].kind in ("word", "text")
        return last.kind in ("num", "word", "text") or last.value in ("}", ")", "pi")

    def _command(self, text: str, position: int, space: bool) -> int:
        name = text[1:]
        if name in _TEXTS or name in _GROUPS:
            return self._group(name, position, space)
        if name in _BARS:
            return self._barred(name, position, space)
        if name in ("begin", "end"):
            close = closing_brace(self.text, position) if self.text[position : position + 1] == "{" else -1
            if close < 0:
                raise Unreadable(f"{text} without a name")
            self.depth += 1 if name == "begin" else -1
            kind = self.text[position + 1 : close].strip().rstrip("*")
            self._put("cmd", f"{name}:{kind}", space)
            return self._braced(kind, close + 1)[1] if (name, kind) == ("begin", "array") else close + 1
        if name in _OPENING:
            self.depth += 1
        elif name in _CLOSING:
            self.depth = max(0, self.depth - 1)
        kind, value = _COMMANDS.get(name, ("cmd", name))
        self._put(kind, value, space)
        return position

    def _braced(self, name: str, position: int) -> tuple[str, int]:
        """Return the content of the braces after a command and the position after them.

        Raises:
            Unreadable: No brace, or one that is not closed.
        """
        start = position
        while start < len(self.text) and self.text[start].isspace():
            start += 1
        close = closing_brace(self.text, start) if self.text[start : start + 1] == "{" else -1
        if close < 0:
            raise Unreadable(f"\\{name} without its braces")
        return " ".join(self.text[start + 1 : close].split()), close + 1

    def _barred(self, name: str, position: int, space: bool) -> int:
        """Read ``\\bar{x}`` as a letter of its own, ``\\overline{AB}`` as the segment AB."""
        letter = _ONE_LETTER.match(self.text, position)
        content, after = (letter[1], letter.end()) if letter else self._braced(name, position)
        if name == "overline" and re.fullmatch(r"[A-Z]{2,3}|[A-Z]( [A-Z])+", content):
            for capital in content.replace(" ", ""):
                self._put("sym", capital, space)
        elif re.fullmatch(r"\\?[a-zA-Z]+(_\{?\w+\}?)?", content):
            mark = "bar" if name == "overline" else name
            self._put("sym", f"{mark}({content})", space)
        else:
            raise Unreadable(f"\\{name} over something that is not a letter")
        return after

    def _group(self, name: str, position: int, space: bool) -> int:
        """Read ``\\text{…}`` and its like: words stay words, mathematics inside is read as mathematics."""
        if name in _GROUPS and not self.text[position:].lstrip().startswith("{"):
            return position
        content, after = self._braced(name, position)
        joint = content.lower().strip(" ,")
        if joint in ("and", "or", "to"):
            self._put("text", joint, space)
        elif (name in _TEXTS and self._after_a_number() and is_symbol_unit(content)) or (
            name in _TEXTS
            and re.fullmatch(r"[^\\{}$]*[a-zA-Z]{2}[^\\{}$]*", content)
            and not _mathematics(content)
        ):
            self._put("text", content, space)
        elif content in SPELLED:
            self._put("fn", content, space)
        elif content:
            if self.depth > 40:
                raise Unreadable("nested too deep", "too_large")
            marks = Tokenizer(content, self.depth + 1).run()
            brace = len(marks) > 1 and not any(m.value in (",", ";") for m in marks)
            if brace:
                self._put("op", "{", space)
            self.tokens.extend(marks)
            if brace:
                self._put("op", "}", False)
        return after


def _mathematics(content: str) -> bool:
    """Return whether the content of a text command is a function name, or digits and operators only."""
    return content in SPELLED or not re.search(r"[a-zA-Z]{2}", content)
