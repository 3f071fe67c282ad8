"""Units and the words after a number: what converts exactly, what must be the same word, what is no unit at all."""

from __future__ import annotations

import re
from fractions import Fraction

from algorist_grader.algebra.tree import Node, Unreadable, mul, num

# name → (factor to the base of its dimension, dimension)
_KNOWN: dict[str, tuple[Fraction, str]] = {}


def _add(dimension: str, **names: str) -> None:
    for name, factor in names.items():
        _KNOWN[name] = (Fraction(factor), dimension)


_add("m", m="1", meter="1", metre="1", cm="1/100", centimeter="1/100", centimetre="1/100", mm="1/1000", millimeter="1/1000",
     km="1000", kilometer="1000", kilometre="1000", dm="1/10", Mm="1000000")  # fmt: skip
_add("inch", inch="1", inche="1", ft="12", foot="12", feet="12", yd="36", yard="36", mile="63360", mi="63360")
_add("g", g="1", gram="1", gm="1", kg="1000", kilogram="1000", mg="1/1000", milligram="1/1000", Mg="1000000")
_add("pound", lb="1", pound="1", oz="1/16", ounce="1/16")
_add("s", s="1", sec="1", second="1", min="60", minute="60", hr="3600", hour="3600", h="3600", day="86400", week="604800", ms="1/1000", Ms="1000000")  # fmt: skip
_add("year", year="1", yr="1", month="1/12")
_add("l", l="1", liter="1", litre="1", ml="1/1000", milliliter="1/1000", L="1", mL="1/1000")
_add("dollar", dollar="1", usd="1", cent="1/100", buck="1")
_add("euro", euro="1", eur="1")
_add("sterling", sterling="1", gbp="1")
_add("rupee", rupee="1", rs="1", inr="1")
_add("yen", yen="1", jpy="1", yuan="1", rmb="1")
_add("degree", deg="1", degree="1")
_add("radian", rad="1", radian="1")
_add("newton", N="1", newton="1", kN="1000")
_add("joule", J="1", joule="1", kJ="1000")
_add("kelvin", K="1", kelvin="1")
_add("volt", V="1", volt="1", mV="1/1000")
_add("watt", W="1", watt="1", kW="1000", mW="1/1000", MW="1000000")
_add("ampere", A="1", ampere="1", amp="1")
_add("coulomb", C="1", coulomb="1")
_add("farad", F="1", farad="1")
_add("tesla", T="1", tesla="1")
_add("hertz", Hz="1", hertz="1")
_add("pascal", Pa="1", pascal="1", kPa="1000")
_add("mole", mol="1", mole="1")
_add("ohm", Omega="1", ohm="1")
_add("electronvolt", eV="1", keV="1000", MeV="1000000", GeV="1000000000")
_add("celsius", degC="1")
_add("fahrenheit", degF="1")

CURRENCIES = frozenset(
    "dollar dollars usd euro euros eur sterling gbp rupee rupees rs inr yen jpy yuan rmb".split()
)
_LETTERS = frozenset("m s g h l L N J K V W Omega".split())
"""Units of one letter that may follow a number after a blank: ``5 m``. The others need ``\\text`` or ``\\mathrm``."""

_SCALES: dict[str, int | str] = {
    "pair": 2, "ten": 10, "dozen": 12, "score": 20, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "half": "1/2", "halve": "1/2", "third": "1/3", "fourth": "1/4", "quarter": "1/4", "fifth": "1/5", "sixth": "1/6", "seventh": "1/7",
    "eighth": "1/8", "ninth": "1/9", "tenth": "1/10", "hundredth": "1/100", "thousandth": "1/1000", "millionth": "1/1000000",
}  # fmt: skip
_PARTS = {name: Fraction(size) for name, size in _SCALES.items() if isinstance(size, str)}
NO_UNIT = frozenset(
    "or and not but if is are was about approximately approx roughly around least most more less than maybe perhaps possibly either between"
    " plus minus times divided over half quarter squared cubed no wrong correct incorrect to from answer because since so why then also except"
    " without versus vs remainder mod factorial choose point e therefore hence sure think wait actually instead rather guess guesses guessed"
    " unsure probably likely presumably hopefully estimate estimates estimated unknown almost nearly rounded ish never none neither nor nope"
    " isn't aren't equals equal means seems looks appears works gives says this that its his as was has does always sometimes unless besides yes"
    " thus towards afterwards otherwise is/are uncertain doubtful definitely certainly surely clearly exactly precisely close closer above below"
    " under beyond up down inf infinity nan true false invalid undefined positive negative odds doubts hopes thinks believes supposes assumes"
    " i we you he she it they with within double triple twice thrice whichever whatever something anything sorry idk hmm minus- non off past basis".split()
)
"""Words after a number that make it another number, a guess, or no number; never a unit, never part of a name."""
_NOUNS = frozenset(
    "people men women children feet fish sheep deer mice geese dice percent mph kph kmh rpm unit way cup day year month week person man woman child"
    " am pm student apple car book coin marble point square cubic sq cc ohm bit byte bp lbs".split()
)
_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_NUMBER_WORDS = {**{w: i for i, w in enumerate(_ONES)}, **{w: 10 * (i + 2) for i, w in enumerate(_TENS)}}
_FILLER = frozenset(
    "of the a an in total altogether each per unit old tall long wide high deep left remaining apart ago".split()
)
_PERCENT = frozenset(("%", "percent", "percentage", "percent points", "percentage points", "per cent"))

_SPELLED = (
    (re.compile(r"\bmph\b"), "mile/hour"),
    (re.compile(r"\bk(?:m|p|mp)h\b"), "km/hour"),
    (re.compile(r"\bms *\^ *- *"), "m s^-"),
    (re.compile(r"\b(?:an?|each|every) (?=(?:second|minute|hour|day|week|month|year)$)"), "per "),
    (re.compile(r"\b(s|seconds?|m|meters?|metres?|cm|centimeters?|feet|inches|units?) squared\b"), r"\1^2"),
    (re.compile(r"\b(s|seconds?|m|meters?|metres?|cm|centimeters?|feet|inches|units?) cubed\b"), r"\1^3"),
)
_MARK = re.compile(r"\^ *-? *\d+|[A-Za-z][A-Za-z.'-]*|[/*]|\d+")

Unit = tuple[Fraction, tuple[tuple[str, int], ...]]
PERCENT: Unit = (Fraction(1), (("percent", 1),))
DEGREE: Unit = (Fraction(1), (("degree", 1),))
RADIAN: Unit = (Fraction(1), (("radian", 1),))


def _singular(word: str) -> str:
    """Return the singular of a regular English plural."""
    if word.endswith("ies"):
        return word[:-3] + "y"
    if word.endswith(("xes", "ches", "shes")):
        return word[:-2]
    return word.removesuffix("s")


def _known(word: str) -> tuple[Fraction, str] | None:
    lower = word.lower().rstrip(".")
    return next((_KNOWN[name] for name in (word, lower, lower.removesuffix("s")) if name in _KNOWN), None)


def _dimension(word: str) -> tuple[Fraction, str]:
    return _known(word) or (Fraction(1), "word:" + _singular(word.lower().rstrip(".")))


def is_noun(word: str) -> bool:
    """Return whether a word can be what was counted: a known unit or noun, or a plural by its looks."""
    lower = word.lower().rstrip(".")
    plural = len(lower) > 3 and lower.endswith("s") and not lower.endswith(("ss", "us", "is"))
    return plural or lower in _NOUNS or _singular(lower) in _NOUNS or _known(word) is not None


def one_letter_unit(name: str) -> Unit | None:
    """Return the unit that a single letter can be after a blank (``m s N J`` …), or None."""
    if name not in _LETTERS:
        return None
    factor, dimension = _KNOWN[name]
    return factor, ((dimension, 1),)


def with_currency(currency: str, unit: str) -> str:
    """Return the unit of ``$20 a day`` and of ``$20 USD``, which names its currency twice."""
    twice = bool(currency) and _known(currency) == _known(unit)
    return currency if twice else f"{currency} {unit}".strip()


def is_symbol_unit(text: str) -> bool:
    """Return whether a text consists of unit symbols and what joins them: ``m``, ``m/s^2``, ``kg m``."""
    words = re.findall(r"[a-zA-Z]+", text)
    symbols = all(w in _KNOWN and (len(w) <= 2 or w in ("mol", "kPa", "min", "sec")) for w in words)
    return bool(words) and symbols and not re.search(r"[^a-zA-Z0-9/*^.\- {}()]", text)


def read_unit(value: Node, text: str) -> Node:
    """Return ``("quantity", scalar, unit)``, or the scalar where the words are only a scale (``3 million``).

    The unit is ``(factor, ((dimension, power), …))``; the value in base units is scalar · factor.

    Raises:
        Unreadable: The words are no unit: a hedge, a comment, a negation.
    """
    text = re.sub(r"[\\{}]", " ", text).strip()
    for pattern, unit_text in _SPELLED:
        text = pattern.sub(unit_text, text)
    text = re.sub(r"\^ +(?=[-\d])", "^", text)
    if re.search(r"[^A-Za-z0-9^/*%.\- ()']", text) or len(text) > 60:
        raise Unreadable("words that are no unit")
    if "%" in text or text.lower().startswith(("percent", "per cent")):
        if text.lower() not in _PERCENT:
            raise Unreadable("words after a percent sign")
        return ("quantity", value, PERCENT)
    scale, unit = _fold(_marks(text, is_one=value[0] == "num" and abs(value[1]) <= 1))
    scaled = mul([value, num(scale)]) if scale != 1 else value
    return ("quantity", scaled, unit) if unit[1] else scaled


def _marks(text: str, *, is_one: bool) -> list[str]:
    """Return the words and signs of a unit.

    Raises:
        Unreadable: A word that no unit has, or no word that can be counted.
    """
    marks = _MARK.findall(text)
    if _MARK.sub("", text).strip(" ()") or (marks and marks[-1] in ("/", "*", "per")):
        raise Unreadable("signs that no unit has")
    words = [m.lower() for m in marks if m[0].isalpha()]
    for word in words[:-1] if words[-1:] == ["times"] else words:
        letter = len(word) == 1 and word not in _FILLER and not (_known(word) or _known(word.upper()))
        if letter or word in NO_UNIT or word in _NUMBER_WORDS or len(words) > 5:
            code = "ambiguous" if word in ("or", "maybe") else "unparseable"
            raise Unreadable(f"the word '{word}' after a number", code)
    until = next(
        (i for i, m in enumerate(marks) if m == "/" or (m[0].isalpha() and m.lower() in _FILLER)), len(marks)
    )
    counted = [m for m in marks[:until] if m[0].isalpha() and m.lower().removesuffix("s") not in _SCALES]
    if counted and not is_noun(counted[-1]) and not is_one:
        raise Unreadable(f"the word '{counted[-1]}' after a number")
    return marks


def _fold(marks: list[str]) -> tuple[Fraction, Unit]:
    """Return the scale and the unit that the marks say."""
    scale = factor = last_factor = Fraction(1)
    powers: dict[str, int] = {}
    sign = pending = 1
    for mark in marks:
        lower = mark.lower()
        if mark == "/" or lower == "per":
            sign = -1
        elif mark.startswith("^"):
            last = next(reversed(powers), None)
            size = int(mark[1:].replace(" ", ""))
            if last is None or abs(size) > 9 or powers[last] not in (1, -1):
                raise Unreadable("a power without a unit")
            factor *= last_factor ** (powers[last] * (size - 1))
            powers[last] *= size
        elif mark[0].isdigit():
            raise Unreadable("a number after the number")
        elif lower.removesuffix("s") in _SCALES and sign == 1:
            scale *= Fraction(_SCALES[lower.removesuffix("s")])
        elif lower in ("square", "sq", "sq."):
            pending = 2
        elif lower == "cubic":
            pending = 3
        elif mark != "*" and (lower not in _FILLER or mark in _KNOWN or lower == "unit"):
            last_factor, dimension = _dimension(mark)
            powers[dimension] = powers.get(dimension, 0) + sign * pending
            factor *= last_factor ** (sign * pending)
            pending = 1
    return scale, (factor, tuple(sorted(powers.items())))


_ORDERS = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}


def number_in_words(text: str) -> Fraction | int | None:
    """Return the value of ``twenty-three``, ``one hundred and five`` or ``two thirds``, or None."""
    whole, _, part_text = text.lower().rpartition(" and ")
    if whole and part_text.removesuffix("s").endswith(tuple(_PARTS)):  # fourteen and two thirds, 6 and a half
        rest = number_in_words(part_text.strip().replace("a half", "half"))
        count = int(whole) if re.fullmatch(r"-?\d{1,9}", whole.strip()) else number_in_words(whole)
        if rest is not None and isinstance(count, int) and 0 < rest < 1:
            return count + (-rest if whole.strip().startswith(("-", "minus", "negative")) else rest)
        return None
    words = [w for w in re.split(r"[\s-]+", text.lower().strip()) if w]
    negative = words[:1] in (["minus"], ["negative"])
    words = words[1:] if negative else words
    if words in (["dozen"], ["a", "dozen"], ["one", "dozen"]):
        return -12 if negative else 12
    part = _PARTS.get(words[-1].removesuffix("s")) if words else None
    if part is not None and (len(words) > 1 or words == ["half"]):
        parts = 1 if words[:-1] in ([], ["a"], ["one"]) else number_in_words(" ".join(words[:-1]))
        return None if parts is None else parts * (-part if negative else part)
    if "point" in words and all(
        word in _ONES[:10] for word in words[words.index("point") + 1 :]
    ):  # three point five
        at = words.index("point")
        digits = "".join(str(_ONES.index(word)) for word in words[at + 1 :])
        before = number_in_words(" ".join(words[:at]))
        size = None if before is None or not digits else before + Fraction(int(digits), 10 ** len(digits))
        return -size if size is not None and negative else size
    if not words or len(words) > 16 or words[0] not in _NUMBER_WORDS:
        return None
    total, current, last = 0, 0, 10**12
    for word in words:
        if word in _NUMBER_WORDS:
            value = _NUMBER_WORDS[word]
            if current % 100 and not (current % 100 >= 20 and current % 10 == 0 and 0 < value < 10):
                return None
            current += value
        elif word == "hundred":
            current = current * 100 if current else 0
        elif word in _ORDERS and _ORDERS[word] < last and current:
            last = _ORDERS[word]
            total, current = total + current * last, 0
        elif word != "and":
            return None
    return -(total + current) if negative else total + current
