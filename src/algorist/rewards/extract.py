"""Reading completions: the blocks, numbers and formulas in a text."""

from __future__ import annotations

import math
import re

from algorist.grading.markers import find_boxes, is_denied

_MATH = re.compile(r"\$([^$]+)\$")
_ALTERNATIVES = re.compile(
    r"[,;/]|,?\s*(?:or|and|maybe|not|and/or)(?:\s+(?:maybe|perhaps|not))?", re.IGNORECASE
)
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def first_block(text: str, opening: str, closing: str) -> str | None:
    """Return what stands between the first ``opening`` and the next ``closing``, or None. Linear time."""
    start = text.find(opening)
    end = text.find(closing, start + len(opening)) if start >= 0 else -1
    return text[start + len(opening) : end] if end >= 0 else None


def follows(text: str, first: str, second: str, *, gap: str = r"\s*") -> int | None:
    """Return the position behind the first ``first`` + gap + ``second``, or None."""
    match = re.search(f"{re.escape(first)}{gap}{re.escape(second)}", text)
    return match.end() if match else None


def plain_float(text: str) -> float | None:
    """Return the finite float that ``text`` writes, or None: no commas, no currency, no "nan", no "inf"."""
    if "_" in text:  # float("1_000") is a Python literal, not a way to write numbers
        return None
    try:
        value = float(text.strip())
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def numbers_in(text: str) -> list[str]:
    """Return the numbers in a text as written, without trailing commas."""
    return [match.rstrip(",") for match in _NUMBER.findall(text)]


def formula_in(text: str) -> str:
    """Return the last box, else the last ``$…$``, else the whole text, stripped; one that is taken back, or one of two, is not taken alone."""
    boxes, unclosed = find_boxes(text)
    if boxes and not unclosed:
        box = boxes[-1]
        return text.strip() if is_denied(text, box.command, box.end) else text[box.start : box.end].strip()
    formulas = list(_MATH.finditer(text))
    if not formulas or is_denied(text, formulas[-1].start()):
        return text.strip()
    between = text[formulas[-2].end() : formulas[-1].start()] if len(formulas) > 1 else ""
    alternatives = _ALTERNATIVES.fullmatch(between.strip()) if between.strip() else None
    return text.strip() if alternatives else formulas[-1][1].strip()
