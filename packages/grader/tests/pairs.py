"""Reads ``grading_pairs.txt``: (category, sign, gold, answer)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).parent / "golden/grading_pairs.txt"


def pairs() -> Iterator[tuple[str, str, str, str]]:
    """Yield every labelled pair."""
    category = ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("[") and line.endswith("]"):
            category = line[1:-1]
        elif line[:2] in ("= ", "! ", "? "):
            gold, *answers = (part.strip(" ") for part in line[2:].split(" ;; "))
            yield from ((category, line[0], gold, answer) for answer in answers)
