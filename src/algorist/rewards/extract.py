"""Reading completions: the text in any form TRL sends it, and the blocks, numbers and formulas in that text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from algorist.errors import ConfigError
from algorist.grading.markers import find_boxes, is_denied

Decode = Callable[[list[int]], str]
_MATH = re.compile(r"\$([^$]+)\$")
_ALTERNATIVES = re.compile(
    r"[,;/]|,?\s*(?:or|and|maybe|not|and/or)(?:\s+(?:maybe|perhaps|not))?", re.IGNORECASE
)
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def text_of(completion: Any, decode: Decode | None = None) -> str:
    """Return the text of a completion in any form that TRL sends.

    Args:
        completion: Text, a message, a list of messages or of texts (the first one counts), or token ids as a list or
            a tensor. None is the empty text.
        decode: Turns token ids into text, for example ``tokenizer.decode``.

    Raises:
        ConfigError: Token ids without ``decode``.
    """
    if completion is None:
        return ""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, dict):
        return _content(completion.get("content"))
    if hasattr(completion, "tolist"):
        completion = completion.tolist()
    if isinstance(completion, int):
        completion = [completion]
    if isinstance(completion, (list, tuple)):
        if not completion:
            return ""
        if not isinstance(completion[0], int):
            return text_of(completion[0], decode)
        if decode is None:
            raise ConfigError(
                "a completion came as token ids, and the rewards cannot read them; "
                "write build_rewards(..., decode=tokenizer.decode)"
            )
        return decode(list(completion))
    return str(completion)


def _content(content: Any) -> str:
    if isinstance(content, (list, tuple)):  # a message in parts: [{"type": "text", "text": …}, …]
        return "".join(str(p.get("text") or "") if isinstance(p, dict) else str(p) for p in content)
    return "" if content is None else str(content)


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
        return text.strip() if is_denied(text, box.command) else text[box.start : box.end].strip()
    formulas = list(_MATH.finditer(text))
    if not formulas or is_denied(text, formulas[-1].start()):
        return text.strip()
    between = text[formulas[-2].end() : formulas[-1].start()] if len(formulas) > 1 else ""
    alternatives = _ALTERNATIVES.fullmatch(between.strip()) if between.strip() else None
    return text.strip() if alternatives else formulas[-1][1].strip()
