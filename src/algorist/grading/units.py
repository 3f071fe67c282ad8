"""Units and the words behind a number: what converts exactly, what must be the same word, what is no unit at all."""

from __future__ import annotations

import re
from fractions import Fraction

from algorist.grading.tree import Node, Unreadable, mul, num

# name → (factor to the base of its dimension, dimension)
_KNOWN: dict[str, tuple[Fraction, str]] = {}


def _add(dimension: str, **names: str) -> None:
    for name, factor in names.items():
        _KNOWN[name] = (Fraction(factor), dimension)


_add("m", m="1", meter="1", metre="1", cm="1/100", centimeter="1/100", centimetre="1/100", mm="1/1000", millimeter="1/1000",
     km="1000", kilometer="1000", kilometre="1000", dm="1/10")  # fmt: skip
_add("inch", inch="1", inche="1", ft="12", foot="12", feet="12", yd="36", yard="36", mile="63360", mi="63360")
_add("g", g="1", gram="1", kg="1000", kilogram="1000", mg="1/1000", milligram="1/1000")
_add("pound", lb="1", pound="1", oz="1/16", ounce="1/16")
_add(
    "s",
    s="1",
    sec="1",
    second="1",
    min="60",
    minute="60",
    hr="3600",
    hour="3600",
    h="3600",
    day="86400",
    week="604800",
    ms="1/1000",
)
_add("year", year="1", yr="1", month="1/12")
_add("l", l="1", liter="1", litre="1", ml="1/1000", milliliter="1/1000", L="1", mL="1/1000")
_add("dollar", dollar="1", usd="1", cent="1/100", buck="1")
_add("euro", euro="1", eur="1")
_add("degree", deg="1", degree="1")
_add("radian", rad="1", radian="1")
_add("celsius", degC="1")
_add("fahrenheit", degF="1")

_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_NO_UNIT = frozenset(
    "or and not but if is are was about approximately roughly around least most more less than maybe perhaps possibly either between plus minus"
    " times divided over half quarter squared cubed no wrong correct incorrect to from answer because since so why then also except without"
    " versus vs remainder mod factorial choose point e therefore hence sure think wait actually instead rather".split()
)
_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_NUMBER_WORDS = {**{w: i for i, w in enumerate(_ONES)}, **{w: 10 * (i + 2) for i, w in enumerate(_TENS)}}
_FILLER = frozenset("of the a an in total altogether each per unit".split())


def _dimension(word: str) -> tuple[Fraction, str]:
    for name in (word, word.lower(), word.lower().rstrip("."), word.lower().rstrip(".").removesuffix("s")):
        if name in _KNOWN:
            return _KNOWN[name]
    plain = word.lower().rstrip(".")
    return Fraction(1), "word:" + (plain[:-3] + "y" if plain.endswith("ies") else plain.removesuffix("es") if plain.endswith(("xes", "ches", "shes")) else plain.removesuffix("s"))  # fmt: skip


def one_letter_unit(name: str) -> tuple[Fraction, tuple[tuple[str, int], ...]] | None:
    """Return the unit that a single letter can be (``m s g h l L``), or None."""
    if name not in ("m", "s", "g", "h", "l", "L"):
        return None
    factor, dimension = _KNOWN[name]
    return factor, ((dimension, 1),)


def read_unit(value: Node, text: str) -> Node:
    """Return ``("quantity", scalar, unit)``, or the scalar where the words are only a scale (``3 million``).

    The unit is ``(factor, ((dimension, power), …))``; the value in base units is scalar · factor.

    Raises:
        Unreadable: The words are no unit: a hedge, a comment, a negation.
    """
    text = text.replace("\\", " ")
    if re.search(r"[^A-Za-z0-9^/*%.\- ()']", text) or len(text) > 60:
        raise Unreadable("words that are no unit")
    if "%" in text or re.fullmatch(r"percent(age)?( points?)?", text.strip(), re.IGNORECASE):
        if text.strip() not in ("%", "percent", "percentage", "percent points", "percentage points"):
            raise Unreadable("words after a percent sign")
        return ("quantity", value, (Fraction(1), (("percent", 1),)))
    factor = last_factor = Fraction(1)
    powers: dict[str, int] = {}
    sign, pending, words = 1, 1, 0
    for mark in re.findall(r"\^ *-? *\d+|[A-Za-z][A-Za-z.']*|[/*]|[\d\-()]+", text):
        if mark == "/" or mark.lower() == "per":
            sign = -1
        elif mark in ("*", "-", "(", ")"):
            continue
        elif mark.startswith("^"):
            last = next(reversed(powers), None)
            size = int(mark[1:].replace(" ", ""))
            if last is None or abs(size) > 9 or powers[last] not in (1, -1):
                raise Unreadable("a power without a unit")
            factor *= last_factor ** (powers[last] * (size - 1))
            powers[last] *= size
        elif not mark[0].isalpha():
            raise Unreadable("a number after the number")
        else:
            lower = mark.lower()
            words += 1
            if words > 5 or lower in _NO_UNIT or lower in _NUMBER_WORDS:
                raise Unreadable(
                    f"the word '{mark}' after a number",
                    "ambiguous" if lower in ("or", "maybe") else "unparseable",
                )
            if lower in _SCALES and not powers:
                value = mul([value, num(_SCALES[lower])])
            elif lower in ("square", "sq", "sq."):
                pending = 2
            elif lower == "cubic":
                pending = 3
            elif lower not in _FILLER or lower == "unit":
                last_factor, dimension = _dimension(mark)
                size = sign * pending
                powers[dimension] = powers.get(dimension, 0) + size
                factor *= last_factor**size
                pending = 1
    if not powers:
        return value
    return ("quantity", value, (factor, tuple(sorted(powers.items()))))


_ORDERS = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}


def number_in_words(text: str) -> int | None:
    """Return the value of ``twenty-three`` or ``one hundred and five``, or None."""
    words = [w for w in re.split(r"[\s-]+", text.lower().strip()) if w]
    negative = words[:1] in (["minus"], ["negative"])
    words = words[1:] if negative else words
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
