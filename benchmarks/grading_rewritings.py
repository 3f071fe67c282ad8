"""Fair rewritings and near-misses of a gold answer, made by rules: what models write, and what must never be paid.

A rule gets the bare gold (no dollar signs around it) and a seeded random source, and returns an answer or None where it
does not apply. Rules look at the text only, never at our parser, so that they share no mistake with it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from fractions import Fraction

Rule = Callable[[str, random.Random], "str | None"]
FAIR: dict[str, Rule] = {}
WRONG: dict[str, Rule] = {}

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])")
_WORDS = re.compile(r"[a-zA-Z]{2,}")


def fair(name: str) -> Callable[[Rule], Rule]:
    """Register a rewriting that says the same."""

    def add(rule: Rule) -> Rule:
        FAIR[name] = rule
        return rule

    return add


def wrong(name: str) -> Callable[[Rule], Rule]:
    """Register a near-miss: an answer that says something else."""

    def add(rule: Rule) -> Rule:
        WRONG[name] = rule
        return rule

    return add


# -- what kind of gold it is --------------------------------------------------------------------------------------
def bare(gold: str) -> str:
    """Take one pair of dollar signs and white space off the gold."""
    text = gold.strip()
    inner = text[1:-1]
    return inner.strip() if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in inner else text


def is_number(text: str) -> bool:
    """Say whether the gold is a plain decimal."""
    return bool(_NUMBER.fullmatch(text))


def is_value(text: str) -> bool:
    """Say whether the gold is a number as models write numbers: digits, fractions, roots, pi."""
    rest = re.sub(r"\\(?:[dt]?frac|sqrt|pi|cdot)(?![a-zA-Z])", "", text)
    return bool(re.fullmatch(r"[-+\d./{}() ]*\d[-+\d./{}() ]*", rest)) and balanced(text)


def is_formula(text: str) -> bool:
    """Say whether the gold is one expression with letters: no words, lists, relations, units."""
    rest = re.sub(r"\\(?:[dt]?frac|sqrt|pi|cdot|sin|cos|tan|ln|log|left|right|theta|alpha|beta|lambda|omega)(?![a-zA-Z])", "", text)  # fmt: skip
    return (
        bool(re.search(r"[a-zA-Z]", rest))
        and not re.search(r"\\|[=<>,;:$%\n'&|!]|[a-zA-Z]{4,}", rest)
        and balanced(text)
        and not re.search(r"[a-zA-Z] *\(|\de-?\d|cm|\.$", rest)
    )


def balanced(text: str) -> bool:
    """Say whether braces and brackets match in number."""
    return all(text.count(a) == text.count(b) for a, b in ("{}", "()", "[]"))


def parts(text: str, at: str = ",") -> list[str]:
    """Split at a mark outside all brackets."""
    found, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == at and depth == 0:
            found.append(text[start:place].strip())
            start = place + 1
    return [*found, text[start:].strip()]


def terms(text: str) -> list[str]:
    """Split a sum into signed terms at the outermost plus and minus signs."""
    found, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if (
            char in "+-"
            and depth == 0
            and place
            and text[:place].rstrip()[-1:] not in ("", "^", "_", "(", "/", "*")
        ):
            found.append(text[start:place].strip())
            start = place
    return [*found, text[start:].strip()]


def pair(text: str) -> tuple[str, str, str, str] | None:
    """Return opener, both halves and closer of ``(a,b)`` and its like."""
    plain = text.replace("\\left", "").replace("\\right", "").strip()
    if (
        len(plain) < 5
        or plain[0] not in "(["
        or plain[-1] not in ")]"
        or not balanced(plain.translate(str.maketrans("[]", "()")))
    ):
        return None
    halves = parts(plain[1:-1])
    return (plain[0], halves[0], halves[1], plain[-1]) if len(halves) == 2 and all(halves) else None


def interval(text: str) -> tuple[str, str, str, str] | None:
    """Return the pair where it can only be an interval: half open or without end."""
    found = pair(text)
    if found is None or not ("infty" in text or found[0] + found[3] not in ("()", "[]")):
        return None
    return found if all(is_value(h) or "infty" in h for h in found[1:3]) else None


def _fraction(text: str) -> Fraction | None:
    if re.search(r"\d *\\[dt]?frac", text):  # a mixed number
        return None
    plain = re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text.replace(" ", ""))
    return Fraction(plain) if re.fullmatch(r"-?\d+(/[1-9]\d*|\.\d+)?", plain) else None


# -- fair: spelling -----------------------------------------------------------------------------------------------
WRAPS = (
    "${}$",
    "\\({}\\)",
    "\\boxed{{{}}}",
    "**{}**",
    "{}.",
    " {} ",
    "$\\displaystyle {}$",
    "The answer is {}",
)
for _number, _wrap in enumerate(WRAPS):

    def _wrapped(g: str, r: random.Random, wrap: str = _wrap) -> str | None:
        return None if (wrap[:1].isalpha() and "olution" in g) or g.endswith(".") else wrap.format(g)

    FAIR[f"wrap {_number}"] = _wrapped


@fair("dfrac")
def _dfrac(g: str, r: random.Random) -> str | None:
    return g.replace("\\frac", r.choice(["\\dfrac", "\\tfrac"])) if "\\frac" in g else None


@fair("over")
def _over(g: str, r: random.Random) -> str | None:
    new = re.sub(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}", r"{\1 \\over \2}", g)
    return new if new != g else None


@fair("slash")
def _slash(g: str, r: random.Random) -> str | None:
    new = re.sub(r"(?<![\d}] )(?<![\d}])\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}(?=$|[-+ ,)\]])", r"(\1)/(\2)", g)
    return new if new != g else None


@fair("decimal")
def _decimal(g: str, r: random.Random) -> str | None:
    value = _fraction(g)
    if value is None or value.denominator == 1 or any(value.denominator % p == 0 for p in (3, 7, 11, 13)):
        return None
    found = f"{float(value):.12g}"
    return found if Fraction(found) == value and "e" not in found else None


@fair("scaled fraction")
def _scaled(g: str, r: random.Random) -> str | None:
    value, k = _fraction(g), r.randrange(2, 9)
    return f"\\frac{{{value.numerator * k}}}{{{value.denominator * k}}}" if value is not None else None


@fair("trailing zeros")
def _zeros(g: str, r: random.Random) -> str | None:
    return (g + (".0" if "." not in g else "0")) if is_number(g) else None


@fair("thousands")
def _thousands(g: str, r: random.Random) -> str | None:
    if not re.fullmatch(r"-?\d{4,}", g):
        return None
    return f"{int(g):,}".replace(",", r.choice([",", "{,}", ",\\!", "\\,"]))


@fair("scientific")
def _scientific(g: str, r: random.Random) -> str | None:
    found = re.fullmatch(r"(-?\d(?:\.\d+)?)e(-?\d+)", g)
    return f"{found[1]} \\times 10^{{{found[2]}}}" if found else None


@fair("blanks left out")
def _tight(g: str, r: random.Random) -> str | None:
    if "text" in g or "mathrm" in g or re.search(r"(?<!\\)\b[a-zA-Z]{3,}\b", g) or "operatorname" in g:
        return None
    new = re.sub(r"(\\[a-zA-Z]+) +(?=[a-zA-Z])", "\\1\x00", g)
    new = re.sub(r"(?<![\d ]) +| +(?![\d ])", "", new).replace("\x00", " ")
    return new if new != g else None


@fair("blanks put in")
def _loose(g: str, r: random.Random) -> str | None:
    if "text" in g or "\\" in g or _WORDS.search(g) or not re.search(r"[a-zA-Z]", g):
        return None
    return re.sub(r"(?<=[a-zA-Z])(?=[a-zA-Z])", " ", g)


@fair("thin spaces")
def _thin(g: str, r: random.Random) -> str | None:
    new = re.sub(r"(?<=[a-zA-Z\d}]) *([-+=]) *(?=[a-zA-Z\d\\])", r"\\,\1\\; ", g)
    return new if new != g and "e" not in g and "text" not in g else None


@fair("left right")
def _sized(g: str, r: random.Random) -> str | None:
    if "left" in g or not re.search(r"[()]", g) or "\\(" in g or not re.fullmatch(r"[^\[\]]*", g):
        return None
    return g.replace("(", "\\left(").replace(")", "\\right)")


@fair("unicode")
def _unicode(g: str, r: random.Random) -> str | None:
    new = (
        g.replace("-", "−")
        .replace("\\pi", "π")
        .replace("\\infty", "∞")
        .replace("^2", "²")
        .replace("^{2}", "²")
    )
    new = (
        new.replace("\\cup", "∪")
        .replace("\\le ", "≤ ")
        .replace("\\ge ", "≥ ")
        .replace("^\\circ", "°")
        .replace("^{\\circ}", "°")
    )
    return new if new != g and not re.search(r"\^[^ ]*−", new) else None


# -- fair: letters, powers, roots ---------------------------------------------------------------------------------
@fair("braced powers")
def _braced(g: str, r: random.Random) -> str | None:
    new = re.sub(r"\^(\d|[a-z])(?!\d)", r"^{\1}", g)
    return (
        new
        if new != g
        else re.sub(r"\^\{(\d|[a-z])\}", r"^\1", g)
        if re.search(r"\^\{(\d|[a-z])\}", g)
        else None
    )


@fair("star powers")
def _stars(g: str, r: random.Random) -> str | None:
    if not is_formula(g) or "\\" in g or not re.search(r"\^\{?\d+\}?", g):
        return None
    if re.search(r"\{[^{}]*[a-z ][^{}]*\}", g):
        return None
    new = re.sub(r"\^\{?(\d+)\}?", r"**\1", g)
    new = re.sub(r"(?<=\d) *(?=[a-zA-Z(])", "*", new)
    return re.sub(r"(?<=[a-zA-Z)]) *(?=[a-zA-Z(])", "*", new)


@fair("cdot between letters")
def _cdot(g: str, r: random.Random) -> str | None:
    new = re.sub(r"(?<![\\a-zA-Z])([a-zA-Z]) +([a-zA-Z])(?![a-zA-Z(])", r"\1 \\cdot \2", g)
    return new if new != g and is_formula(g) else None


@fair("factors swapped")
def _swapped(g: str, r: random.Random) -> str | None:
    if not is_formula(g):
        return None
    new = re.sub(
        r"(?<![\\a-zA-Z^_/])([a-zA-Z]) ?([a-zA-Z](?:\^(?:\d|\{\d+\}))?)(?![a-zA-Z^_/'(!])",
        r"\2 \1",
        g,
        count=1,
    )
    return new if new != g else None


@fair("terms turned")
def _turned(g: str, r: random.Random) -> str | None:
    if not (is_formula(g) or is_value(g)):
        return None
    found = terms(g)
    if len(found) < 2:
        return None
    first, *rest = found[::-1]
    last = rest.pop()
    last = last if last[0] in "+-" else "+" + last
    return f"{first.lstrip('+').strip()}{''.join(rest)}{last}"


@fair("root as power")
def _root_power(g: str, r: random.Random) -> str | None:
    new = re.sub(r"\\sqrt *\{([^{}]+)\}", r"(\1)^{1/2}", g)
    new = re.sub(r"\\sqrt *\[(\w)\] *\{([^{}]+)\}", r"(\2)^{1/\1}", new)
    return new if new != g and "frac" not in g and "-" not in g and (is_formula(g) or is_value(g)) else None


@fair("bare root")
def _bare_root(g: str, r: random.Random) -> str | None:
    new = re.sub(r"\\sqrt *\{(\d+)\}", r"sqrt(\1)", g)
    return new if new != g and "\\" not in new else None


@fair("fraction over one")
def _over_one(g: str, r: random.Random) -> str | None:
    return f"\\frac{{{g}}}{{1}}" if is_formula(g) or is_value(g) else None


# -- fair: units --------------------------------------------------------------------------------------------------
UNITS = (
    "{}\\text{{ cm}}", "{} \\mathrm{{~m}}", "{} m", "{} s", "{} N", "{} J", "{} K", "{} V", "{} m/s", "{} m/s^2", "{}\\text{{ m}}",
    "{}\\,\\text{{s}}", "{}\\ \\mathrm{{N}}", "{} \\mathrm{{J}}", "{}\\,\\mathrm{{m/s}}", "{}\\,\\text{{m/s}}^2", "{} \\mathrm{{m}}/\\mathrm{{s}}^2", "{}\\text{{ m}}^2",
    "{} km/h", "{} degrees", "{}^\\circ", "{}^{{\\circ}}", "\\${}", "€{}", "£{}", "{} dollars", "{} apples", "{} cm^2", "{} square units", "{}\\text{{ units}}",
    "{} people", "{} hours", "{} kg", "{}\\text{{ miles per hour}}", "{} \\mathrm{{~kg}}", "{}\\%", "{} students",
)  # fmt: skip
for _number, _unit in enumerate(UNITS):

    def _with_unit(g: str, r: random.Random, unit: str = _unit) -> str | None:
        return unit.format(g) if is_number(g) and g[0] != "-" else None

    FAIR[f"unit {_unit.format('')}".replace("\\", "")] = _with_unit


# -- fair: names, equations ---------------------------------------------------------------------------------------
_NAMES = {
    "value": ("x = {}", "n={}", "|AB| = {}", "AB={}", "\\text{{Area}} = {}", "P(X=2) = {}", "f(3)={}", "a_1={}", "\\triangle ABC = {}", "S_{{\\triangle ABC}}={}", "m + n = {}"),
    "formula": ("y = {}", "f(x) = {}", "f'(x)={}", "\\frac{{dy}}{{dx}}={}", "y'={}", "\\frac{{d}}{{dx}}f(x) = {}", "S_n={}", "dy/dx = {}"),
}  # fmt: skip
for _kind, _names in _NAMES.items():
    for _name in _names:

        def _named(g: str, r: random.Random, name: str = _name, kind: str = _kind) -> str | None:
            right_kind = is_value(g) if kind == "value" else is_formula(g) and "x" in g and "y" not in g
            return name.format(g) if right_kind else None

        FAIR[f"name {_name.format('')}"] = _named


@fair("angle name")
def _angle(g: str, r: random.Random) -> str | None:
    return (
        r.choice(["\\angle A = {}", "\\angle ABC={}", "m\\angle B={}", "\\theta={}"]).format(g)
        if "circ" in g and _WORDS.findall(g) == ["circ"]
        else None
    )


@fair("point name")
def _point(g: str, r: random.Random) -> str | None:
    halves = pair(g)
    return (
        "(x,y) = " + g
        if halves and halves[0] + halves[3] == "()" and all(is_value(h) for h in halves[1:3])
        else None
    )


@fair("ratio name")
def _ratio(g: str, r: random.Random) -> str | None:
    return r.choice(["S_1:S = ", "a:b=", "AB:CD = "]) + g if re.fullmatch(r"\d+:\d+", g) else None


@fair("name left out")
def _unnamed(g: str, r: random.Random) -> str | None:
    found = re.fullmatch(r"[a-zA-Z] *= *([^=,;]+)", g)
    return found[1] if found and is_value(found[1]) else None


def _sides(g: str) -> tuple[str, str] | None:
    sides = g.split("=")
    ok = len(sides) == 2 and not re.search(r"[,;<>$]|text|\bor\b|\band\b|\\in|'|[a-zA-Z] *\(", g)
    if not ok or not all(s.strip() and (is_formula(s) or is_value(s)) for s in sides):
        return None
    return (
        (sides[0].strip(), sides[1].strip())
        if not re.fullmatch(r"[a-zA-Z]|[A-Za-z]_.*", sides[0].strip())
        else None
    )


@fair("sides swapped")
def _sides_swapped(g: str, r: random.Random) -> str | None:
    sides = _sides(g)
    return f"{sides[1]} = {sides[0]}" if sides else None


@fair("one side zero")
def _one_side(g: str, r: random.Random) -> str | None:
    sides = _sides(g)
    return f"{sides[0]} - ({sides[1]}) = 0" if sides else None


@fair("equation doubled")
def _doubled(g: str, r: random.Random) -> str | None:
    sides = _sides(g)
    return f"2({sides[0]}) = 2({sides[1]})" if sides else None


# -- fair: sets, lists, intervals, inequalities -------------------------------------------------------------------
def _list_of(g: str) -> list[str] | None:
    inner = re.fullmatch(r"\\(?:left)?\s*\\?\{(.+)\\(?:right)?\s*\\?\}", g)
    found = parts(inner[1] if inner else g)
    if re.fullmatch(r"-?[\d., ]+", g):  # thousands, or nobody knows
        return None
    return found if len(found) > 1 and all(is_value(p) for p in found) else None


@fair("list turned")
def _list_turned(g: str, r: random.Random) -> str | None:
    found = _list_of(g)
    return ", ".join(found[::-1]) if found else None


@fair("list with and")
def _list_and(g: str, r: random.Random) -> str | None:
    found = _list_of(g)
    return ", ".join(found[:-1]) + r.choice([" and ", " \\text{ and } "]) + found[-1] if found else None


@fair("bare-brace set")
def _bare_set(g: str, r: random.Random) -> str | None:
    found = _list_of(g)
    return "{" + ", ".join(found) + "}" if found else None


@fair("set")
def _set(g: str, r: random.Random) -> str | None:
    found = _list_of(g)
    return "\\left\\{" + ",".join(found) + "\\right\\}" if found else None


@fair("interval as inequality")
def _as_inequality(g: str, r: random.Random) -> str | None:
    found = interval(g)
    if not found or ("infty" in found[1] and "infty" in found[2]):
        return None
    low, high = ("\\le" if c in "[]" else "<" for c in (found[0], found[3]))
    if "infty" in found[2]:
        return ("x \\ge " if found[0] == "[" else "x > ") + found[1]
    return f"x {high} {found[2]}" if "infty" in found[1] else f"{found[1]} {low} x {high} {found[2]}"


@fair("scaled inequality")
def _scaled_inequality(g: str, r: random.Random) -> str | None:
    plain = _as_inequality(g, r) if interval(g) else g
    found = re.fullmatch(r"([a-z]) *(<|>|\\leq?|\\geq?) *(-?\d+)", plain or "")
    if not found:
        return None
    k, turned = (
        r.choice([2, 3, -1, -2]),
        {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\leq": "\\geq", "\\geq": "\\leq"},
    )
    left = {-1: "-", -2: "-2", 2: "2", 3: "3"}[k] + found[1]
    return f"{left} {found[2] if k > 0 else turned[found[2]]} {int(found[3]) * k}"


@fair("inequality flipped")
def _flipped(g: str, r: random.Random) -> str | None:
    found = re.fullmatch(r"([a-z]) *(<|>|\\leq?|\\geq?) *(-?\d+)", g)
    turned = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\leq": "\\geq", "\\geq": "\\leq"}
    return f"{found[3]} {turned[found[2]]} {found[1]}" if found else None


@fair("x in interval")
def _x_in(g: str, r: random.Random) -> str | None:
    return f"x \\in {g}" if all(interval(p) for p in g.split("\\cup")) else None


@fair("union turned")
def _union_turned(g: str, r: random.Random) -> str | None:
    found = g.split("\\cup")
    return "\\cup".join(found[::-1]) if len(found) > 1 and all(interval(p) for p in found) else None


@fair("union overlapping")
def _overlap(g: str, r: random.Random) -> str | None:
    found = interval(g)
    if not found or "infty" not in found[2] or not re.fullmatch(r"-?\d+", found[1]):
        return None
    start = int(found[1])
    return f"{found[0]}{start},{start + 5}) \\cup ({start + 2}, \\infty)"


@fair("all reals")
def _reals(g: str, r: random.Random) -> str | None:
    plain = re.sub(r"\\left|\\right| ", "", g)
    return r.choice(["\\mathbb{R}", "ℝ", "x \\in \\mathbb{R}"]) if plain == "(-\\infty,\\infty)" else None


@fair("reals without a point")
def _punctured(g: str, r: random.Random) -> str | None:
    found = [interval(p.strip()) for p in g.split("\\cup")]
    if (
        len(found) != 2
        or not all(found)
        or found[0][2] != found[1][1]
        or "infty" not in found[0][1]
        or "infty" not in found[1][2]
    ):  # type: ignore[index]
        return None
    if found[0][3] != ")" or found[1][0] != "(":  # type: ignore[index]
        return None
    return r.choice(["\\mathbb{R} \\setminus \\{%s\\}", "x \\ne %s"]) % found[0][2]  # type: ignore[index]


@fair("brackets of a matrix")
def _matrix(g: str, r: random.Random) -> str | None:
    return (
        g.replace("pmatrix", "bmatrix")
        if "pmatrix" in g
        else g.replace("bmatrix", "pmatrix")
        if "bmatrix" in g
        else None
    )


# -- near-misses --------------------------------------------------------------------------------------------------
@wrong("off by one")
def _one_more(g: str, r: random.Random) -> str | None:
    found = list(re.finditer(r"\d+", g))
    if not found or "text" in g:
        return None
    digit = r.choice(found)
    return g[: digit.start()] + str(int(digit[0]) + 1) + g[digit.end() :]


@wrong("sign")
def _sign(g: str, r: random.Random) -> str | None:
    if not (is_value(g) or is_formula(g)) or g in ("0",) or len(terms(g)) > 1:
        return None
    return g[1:].strip() if g[0] == "-" else "-" + g


@wrong("ten times")
def _ten(g: str, r: random.Random) -> str | None:
    return g + "0" if re.fullmatch(r"-?[1-9]\d*", g) else None


@wrong("upside down")
def _upside(g: str, r: random.Random) -> str | None:
    found = re.fullmatch(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", g)
    return f"\\frac{{{found[2]}}}{{{found[1]}}}" if found and found[1] != found[2] else None


@wrong("truncated")
def _truncated(g: str, r: random.Random) -> str | None:
    value = _fraction(g)
    return f"{float(value):.3f}" if value is not None and Fraction(f"{float(value):.3f}") != value else None


@wrong("power over the product")
def _over_product(g: str, r: random.Random) -> str | None:
    new = re.sub(r"(?<![\\a-zA-Z_^])([a-zA-Z]) ?([a-zA-Z])\^(\d)", r"(\1\2)^\3", g, count=1)
    return new if new != g and is_formula(g) else None


@wrong("another letter")
def _letter(g: str, r: random.Random) -> str | None:
    found = list(_VARIABLE.finditer(g)) if is_formula(g) else []
    if not found:
        return None
    place = r.choice(found)
    return g[: place.start()] + ("q" if place[0] != "q" else "z") + g[place.end() :]


@wrong("letter added")
def _more_letters(g: str, r: random.Random) -> str | None:
    return g + r.choice(["x", "y", "a", "n", " x", "k"]) if is_number(g) and g != "0" else None


@wrong("power added")
def _power(g: str, r: random.Random) -> str | None:
    found = list(re.finditer(r"(?<![\\a-zA-Z_^])[a-zA-Z](?![\w^'({])", g)) if is_formula(g) else []
    if not found:
        return None
    place = r.choice(found).end()
    return f"{g[:place]}^3{g[place:]}"


SCALES = (
    "{} million",
    "\\${} million",
    "{} thousands",
    "{} thousand",
    "{} dozens",
    "{} thirds",
    "{} hundred",
    "{} billion dollars",
    "{}\\text{{ million}}",
    "{} halves",
)
HEDGES = (
    "{} approx", "{} guess", "about {}", "{} maybe", "{} or so", "{} I think", "{} (guess)", "approximately {}", "{} or {more}", "{more} or {}", "{}?", "perhaps {}", "{}, {more}",
    "{} unsure", "{} probably", "between {} and {more}", "{} wrong", "{} ish", "{} likely", "at least {}", "{} hopefully", "{} estimate", "less than {}", "{} is wrong", "{}/{more}",
    "either {} or {more}", "{} \\text{{ or }} {more}", "{} not", "{} presumably", "{} unknown", "{} to {more}", "{} minus", "{} rounded", "{} almost", "nearly {}", "{} - {more}",
)  # fmt: skip
NEGATIONS = (
    "not {}", "not x = {}", "minus {}", "minus x={}", "\\text{{not }} {}", "no {}", "x \\ne {}", "x \\neq {}", "\\neg {}", "\\text{{not}}~{}", "isn't {}", "never {}",
    "x is not {}", "anything but {}", "negative {}", "x > {}", "x \\ge {}", "not equal to {}", "it is not {}", "answer is not {}",
)  # fmt: skip
for _group, _shapes in (("scale", SCALES), ("hedge", HEDGES), ("negation", NEGATIONS)):
    for _shape in _shapes:

        def _shaped(g: str, r: random.Random, shape: str = _shape) -> str | None:
            if not re.fullmatch(r"\d+", g) or g in ("0", "1"):
                return None
            return shape.format(g, more=int(g) + 1)

        WRONG[f"{_group} {_shape.format('', more='')}"] = _shaped


@wrong("negated name")
def _negated_name(g: str, r: random.Random) -> str | None:
    return r.choice(["not ", "minus "]) + g if re.fullmatch(r"[a-z] *= *[1-9]\d*", g) else None


@wrong("another name")
def _another_name(g: str, r: random.Random) -> str | None:
    found = re.fullmatch(r"([a-z]) *= *([^=]+)", g)
    return f"{'w' if found[1] != 'w' else 'v'} = {found[2]}" if found and is_value(found[2]) else None


@wrong("overline")
def _overline(g: str, r: random.Random) -> str | None:
    return (
        r.choice(["\\overline{%s}", "\\bar{%s}"]) % g if is_number(g) or re.fullmatch(r"[a-z]", g) else None
    )


@wrong("brackets as parentheses")
def _brackets(g: str, r: random.Random) -> str | None:
    if not re.fullmatch(r"\d{2,4}", g):
        return None
    divisor = next((d for d in range(2, 10) if int(g) % d == 0), None)
    return f"[{divisor}]({int(g) // divisor})" if divisor else None


@wrong("another unit")
def _other_unit(g: str, r: random.Random) -> str | None:
    found = re.fullmatch(
        r"(\d+) ?\\(?:text|mathrm)\{~?\s*(cm|m|inches|feet|kg|hours|minutes|dollars|cents)\}", g
    )
    return (
        f"{found[1]} \\text{{ {'km' if found[2] != 'km' else 'm'}}}" if found and found[2] != "km" else None
    )


@wrong("element dropped")
def _dropped(g: str, r: random.Random) -> str | None:
    found = _list_of(g)
    return ", ".join(found[1:]) if found and len(set(found)) == len(found) else None


@wrong("element added")
def _added(g: str, r: random.Random) -> str | None:
    found = _list_of(g)
    return ", ".join([*found, "1234567"]) if found else None


@wrong("end opened or closed")
def _ends(g: str, r: random.Random) -> str | None:
    found = interval(g)
    if not found:
        return None
    if "infty" not in found[1]:
        return f"{'(' if found[0] == '[' else '['}{found[1]},{found[2]}{found[3]}"
    return (
        f"{found[0]}{found[1]},{found[2]}{')' if found[3] == ']' else ']'}"
        if "infty" not in found[2]
        else None
    )


@wrong("ends swapped")
def _ends_swapped(g: str, r: random.Random) -> str | None:
    found = pair(g)
    return f"{found[0]}{found[2]},{found[1]}{found[3]}" if found and found[1] != found[2] else None


@wrong("chain against its order")
def _chain(g: str, r: random.Random) -> str | None:
    found = re.fullmatch(r"\((-?\d+) *, *(-?\d+)\)", g)
    return f"{found[1]} < x < {found[2]}" if found and int(found[1]) > int(found[2]) else None


@wrong("sign in an equation")
def _equation_sign(g: str, r: random.Random) -> str | None:
    sides = _sides(g)
    return f"{sides[0]} = -({sides[1]})" if sides and sides[1] != "0" else None


# -- completions --------------------------------------------------------------------------------------------------
FAIR_COMPLETIONS = {
    "box after a box in the reasoning": "<think>I try \\boxed{{{other}}} first.</think> It is \\boxed{{{}}}.",
    "box twice": "so \\boxed{{{}}}, that is \\boxed{{{}}}",
    "answer block": "<think>easy</think> <answer>{}</answer>",
    "hashes": "work\n#### {}",
}
WRONG_COMPLETIONS = {
    "box only in the reasoning": "<think>perhaps \\boxed{{{}}}</think> I do not know.",
    "box in unfinished reasoning": "<think>perhaps \\boxed{{{}}}",
    "not a box": "The answer is not \\boxed{{{}}}.",
    "two boxes": "\\boxed{{{}}} or \\boxed{{{other}}}",
    "block in unfinished reasoning": "<think>perhaps <answer>{}</answer>",
    "unclosed box": "\\boxed{{{}",
}
