"""Text of models, datasets and errors is untrusted: what is shown, wherever, passes ``printable``."""

from __future__ import annotations

import html
import json
import re
from typing import Any

from algorist.store.redact import redact


def printable(text: str) -> str:
    """Return ``text`` as it may be shown: without secrets, every invisible character as an escape (controls, direction marks, surrogates).

    Newline and tab stay.
    """
    text = redact(text)
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else _escape(c) for c in text)


def one_line(text: str, width: int | None = None) -> str:
    """Return ``text`` on one line, line ends shown as ``⏎``, cut to ``width`` characters with ``…``."""
    flat = printable(text.replace("\r\n", "\n")).replace("\n", " ⏎ ").replace("\t", " ")
    return flat if width is None or len(flat) <= width else flat[: max(0, width - 1)] + "…"


def json_text(value: Any, **options: Any) -> str:
    """Return JSON in which every invisible character is an escape of JSON: safe for a terminal, the same when read back."""
    text = json.dumps(value, ensure_ascii=False, **options)
    if text.isascii():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else json.dumps(c)[1:-1] for c in text)


def markdown(text: Any) -> str:
    """Return text for a page of Markdown or HTML: on one line, without markup of either."""
    escaped = html.escape(one_line(str(text)), quote=False)
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", escaped)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, printable, at most 200 characters."""
    lines = (line.strip() for line in str(error)[:100_000].splitlines())
    return printable((next(filter(None, lines), "") or type(error).__name__)[:2000])[:200]


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def number_text(value: float | None, form: str = "{:.3f}") -> str:
    """Return a number as text; ``none`` where there is none."""
    return "none" if value is None else form.format(value)
