"""Exact numbers without sympy: integers, decimals, fractions, mixed numbers, percent, currency, powers of ten.

Everything is a ``fractions.Fraction``; nothing is ever rounded.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from algorist_grader.text import MAX_ANSWER, clean

MAX_DIGITS = 2_000
"""Numbers with more digits than this are refused."""
MAX_EXPONENT = 1_500
"""Powers of ten beyond this are refused."""

_PLAIN = re.compile(r"[+-]?\d{1,18}")
_NUMBER = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d{1,3}(?: \d{3})+(?![\d,])|\d+)(?:\.\d*)?|\.\d+"
_DECIMAL = re.compile(
    rf"([+-]?)\s*(?:\\?\$\s*)?([+-]?)(?P<n>{_NUMBER})(?:[eE](?P<e>[+-]?\d{{1,5}})"
    r"|\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*(?P<p>[+-]?\d{1,5})\s*\}|\(\s*(?P<r>[+-]?\d{1,5})\s*\)|(?P<q>[+-]?\d{1,5})))?"
)
_SLASH = re.compile(r"([+-]?)\s*(?:(\d{1,400})\s+)?([+-]?\d{1,400})\s*/\s*([+-]?\d{1,400})")
_FRAC = re.compile(
    r"([+-]?)\s*(\d{1,400}\s*)?\\[dtc]?frac\s*(?:\{\s*([+-]?\d{1,400})\s*\}|(\d))\s*(?:\{\s*([+-]?\d{1,400})\s*\}|(\d))"
)
_REPEATING = re.compile(
    r"([+-]?)(\d*)\.(\d*)(?:\\overline\s*\{\s*(\d+)\s*\}|\\bar\s*\{\s*(\d+)\s*\}|\\overline(\d)|\((\d+)\))"
)
_DOTS = re.compile(r"([+-]?)(\d*)\.(\d{3,})\s*(?:\.\.\.|\\ldots|\\dots|\\cdots)")


def repeating(sign: str, whole: str, before: str, period: str) -> Fraction:
    """Return the value of ``whole.before(period)``: the period repeats for ever."""
    scale = 10 ** len(before)
    value = Fraction(int(whole + before or "0"), scale) + Fraction(
        int(period), scale * (10 ** len(period) - 1)
    )
    return -value if sign == "-" else value


def period_of(digits: str) -> tuple[str, str] | None:
    """Split the digits before an ellipsis into what comes before the period and the period; None if none shows."""
    for length in range(1, len(digits) // 2 + 1):
        shown = 3 if length == 1 else 2
        period = digits[-length:]
        if digits.endswith(period * shown):
            return digits[: -length * shown], period
    return None


def _decimal(match: re.Match[str]) -> Fraction | None:
    if match[1] and match[2]:
        return None
    digits = match["n"].replace(",", "").replace(" ", "").rstrip(".")
    power = int(match["e"] or match["p"] or match["q"] or match["r"] or 0)
    if len(digits) > MAX_DIGITS or abs(power) > MAX_EXPONENT:
        return None
    value = Fraction(digits or "0")
    if power:
        value *= Fraction(10) ** power
    return -value if "-" in (match[1], match[2]) else value


def _ratio(sign: str, whole: str | None, top: str, bottom: str) -> Fraction | None:
    if int(bottom) == 0:
        return None
    value = Fraction(int(top), int(bottom))
    if whole:
        if value < 0:
            return None
        value += int(whole)
    return -value if sign == "-" else value


def numeric_value(text: str) -> Fraction | None:
    """Return the exact value of a plain number, or None if the text is anything else.

    Reads integers, decimals, thousands separators (``1,234``, ``1 234``, ``1{,}234``), fractions (``3/4``,
    ``\\frac34``), mixed numbers (``3 1/2``), a leading ``$`` and a trailing ``%`` (which are dropped, not applied),
    scientific notation, repeating decimals (``0.\\overline{3}``, ``0.(3)``, ``0.333...``), digits of any script.
    Short texts are remembered.
    """
    return _value(text) if len(text) <= 100 else _value.__wrapped__(text)


@lru_cache(maxsize=32_768)
def _value(text: str) -> Fraction | None:
    if _PLAIN.fullmatch(text):
        return Fraction(int(text))
    if len(text) > MAX_ANSWER:
        return None
    cleaned = clean(text)
    if not cleaned:
        return None
    if cleaned.endswith("%"):
        cleaned = cleaned[:-1].removesuffix("\\").rstrip()
    if len(cleaned) > MAX_DIGITS:
        return None
    return _read(cleaned)


def _read(text: str) -> Fraction | None:
    if match := _DECIMAL.fullmatch(text):
        return _decimal(match)
    if match := _SLASH.fullmatch(text):
        return _ratio(match[1], match[2], match[3], match[4])
    if match := _FRAC.fullmatch(text):
        return _ratio(match[1], (match[2] or "").strip(), match[3] or match[4], match[5] or match[6])
    if match := _REPEATING.fullmatch(text):
        return repeating(match[1], match[2], match[3], match[4] or match[5] or match[6] or match[7])
    if (match := _DOTS.fullmatch(text)) and (split := period_of(match[3])):
        return repeating(match[1], match[2], *split)
    return None
