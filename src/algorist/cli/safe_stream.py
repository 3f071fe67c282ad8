"""Standard output and standard error, which show invisible characters as escapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO

from algorist.store.safe_text import printable


class SafeStream:
    """A text stream that shows invisible characters as escapes, whoever prints.

    Rich writes past it, to ``rich_proxied_file``: it sends sequences of its own, and its text is made printable before. ``below``
    is where text goes: the same, or what prints it above a bar that moves. A return at the beginning of a piece passes, for
    progress bars.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = self.below = stream

    def write(self, text: str) -> int:
        """Write text, made printable."""
        start = "\r" if text.startswith("\r") else ""
        self.below.write(start + printable(text[len(start) :]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines, made printable."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)
