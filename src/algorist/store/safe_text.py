"""Text of models and datasets is untrusted: this makes it safe for a terminal and for a spreadsheet."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def printable(text: str) -> str:
    """Return ``text`` with every invisible character shown as an escape: controls, direction marks, surrogates.

    Newline and tab stay.
    """
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else _escape(c) for c in text)


def one_line(text: str, width: int | None = None) -> str:
    """Return ``text`` on one line, line ends shown as ``⏎``, cut to ``width`` characters with ``…``."""
    flat = printable(text.replace("\r\n", "\n")).replace("\n", " ⏎ ").replace("\t", " ")
    return flat if width is None or len(flat) <= width else flat[: max(0, width - 1)] + "…"


def csv_cell(value: Any) -> Any:
    """Return ``value`` so that no spreadsheet takes it for a formula; numbers and None pass."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = str(value).replace("\x00", "\\x00").encode("utf-8", errors="backslashreplace").decode("utf-8")
    return "'" + text if text.lstrip(" ").startswith(_FORMULA) else text


def write_csv(rows: Iterable[Mapping[str, Any]], file: TextIO) -> None:
    """Write rows with a heading line; the first row names the columns."""
    writer = None
    for row in rows:
        if writer is None:
            names = list(row)
            writer = csv.writer(file)
            writer.writerow([csv_cell(n) for n in names])
        writer.writerow([csv_cell(row.get(n)) for n in names])


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
