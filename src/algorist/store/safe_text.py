"""Text of models and datasets is untrusted: this makes it safe for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return ``text`` with control characters (other than newline and tab) and direction marks shown as escapes."""
    return "".join(c if c in "\n\t" or (c.isprintable() and c not in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069") else f"\\x{ord(c):02x}" for c in text)
