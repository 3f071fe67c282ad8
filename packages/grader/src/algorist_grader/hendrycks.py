"""The matcher ``hendrycks_sympy``: MATH's string normaliser, then tuples, fractions and differences as PRM800K grades them.

It behaves as that system does, without its ``eval``: where that system simplifies a difference with sympy, our own comparison decides.
"""

from __future__ import annotations

import re

from algorist_grader.symbolic import Limits, symbolic
from algorist_grader.text import MAX_ANSWER, clean

_UNITS = "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard|dollars?|cents?|units?|square|people|points"


def _braced(text: str) -> str:
    """Write ``\\frac12`` and ``\\sqrt3`` with braces, without blanks."""
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    return re.sub(r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}", text)


def normalise(answer: str) -> str:
    """Return MATH's normal form of an answer."""
    text = answer.strip()
    wrapped = re.fullmatch(r"\\text\{(.+?)\}", text)
    text = wrapped[1].strip() if wrapped else text
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    text = text.replace("\\left", "").replace("\\right", "")
    text = text.replace("^{\\circ}", "").replace("^\\circ", "")
    text = text.replace("\\$", "").replace("$", "")
    text = re.split(r"\\text\{ ", text)[0]
    text = text.replace("\\%", "").replace("%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0].strip()) <= 2:
        text = sides[1]
    text = _braced(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    slash = re.fullmatch(r"(-?\d+)/(-?\d+)", text)
    return f"\\frac{{{slash[1]}}}{{{slash[2]}}}" if slash else text


def _sympy_form(answer: str) -> str:
    """Return PRM800K's normal form: text wrappers, units, separators and the case go."""
    text = answer.strip()
    wrapped = re.fullmatch(r"\\text\{(.+)\}", text)
    text = wrapped[1] if wrapped else text
    text = text.replace("\\%", "%").replace("\\$", "$").replace("$", "").replace("%", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, factor in (("million", 10**6), ("billion", 10**9), ("trillion", 10**12)):
        text = text.replace(word, f"*{factor}")
    text = re.sub(rf"({_UNITS})(es)?s?( *\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if len(text) > 1 and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    number = re.fullmatch(r"\s*(-?\d+)\.0*\s*", text)
    text = number[1] if number else text
    text = re.sub(r"- *", "-", text)
    text = re.sub(r"(\d) +(\d+/\d+)", r"\1+\2", text) if re.search(r"\d +\d+/\d+", text) else text
    text = text.replace(" ", "")
    plain = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", text)
    return (plain if re.fullmatch(r"-?\d+(\.\d+)?", plain) else text).lower()


_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}(?:\^\{?\d\}?)?")
_SIGNS = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|\\?%|\\\$")
_UNIT_AFTER = re.compile(r"(?<=[\d}])\s*[a-zA-Z][a-zA-Z ./^\d]{0,40}$")
_WORD_BEFORE = re.compile(r"^[a-zA-Z ]{1,20}(?=\d)")


def plain_form(answer: str) -> str:
    """Return an answer without what both normal forms drop: text wrappers, units, degrees, percent, currency, ``x =``, blanks."""
    text = clean(answer) or "" if len(answer) <= MAX_ANSWER else ""
    text = _WRAPPED.sub(lambda m: m[1] if any(c.isdigit() for c in m[1]) else " ", text)
    text = _SIGNS.sub(" ", text).rpartition("=")[2].strip()
    text = text[1:-1] if re.fullmatch(r"\{[^{}]*\}", text) else text
    return re.sub(r"[\s,]", "", _WORD_BEFORE.sub("", _UNIT_AFTER.sub("", text)))


def _parts(text: str) -> list[str]:
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not set(text[1:-1]) & set("()[]"):
        return [part.strip() for part in text[1:-1].split(",")]
    return [text]


def _is_fraction(text: str) -> bool:
    match = re.fullmatch(r"-?(?:\d+/(\d+)|\\frac\{\d+\}\{(\d+)\})", text)
    return bool(match and int(match[1] or match[2]))


def _integer(text: str) -> bool:
    return bool(re.fullmatch(r"-?\d{1,3}(,?\d{3})*|-?\d+", text))


def _risky(text: str) -> bool:
    letters = set(re.sub(r"\\[a-zA-Z]+|sqrt|frac|pi", "", text)) & set("abcdefghijklmnopqrstuvwxyz")
    return (
        len(letters) > 2
        or any(bad in text for bad in ("^{", "^("))
        or bool(re.search(r"\^[0-9]+\^|\^[0-9]{2,}", text))
    )


def hendrycks_sympy(answer: str, gold: str) -> bool:
    """Return the verdict."""
    if normalise(answer) == normalise(gold):
        return True
    truth, said = _sympy_form(gold), _sympy_form(answer)
    if truth == said:
        return True
    gold_parts, answer_parts = _parts(truth), _parts(said)
    if not said or len(gold_parts) != len(answer_parts):
        return False
    if len(gold_parts) > 1 and (truth[0] != said[0] or truth[-1] != said[-1]):
        return False
    return all(_element(g, w) for g, w in zip(answer_parts, gold_parts, strict=True))


def _element(answer: str, truth: str) -> bool:
    if answer == truth:
        return True
    if _is_fraction(answer) and _is_fraction(truth):
        return False  # both are plain fractions: an unreduced one is not accepted
    if _integer(truth):
        return _integer(answer) and int(answer.replace(",", "")) == int(truth.replace(",", ""))
    if _risky(answer) or _risky(truth):
        return False
    return symbolic(answer, truth, Limits())[0]
