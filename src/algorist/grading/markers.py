"""The marks that answers are read from: ``\\boxed{…}``, ``####``, reasoning tags. The only place that reads them; linear in the text.

Only the last ``MAX_COMPLETION`` characters are looked at: an answer stands at the end, and no text can cost more than that.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_COMPLETION = 100_000
"""Characters at the end of a completion in which boxes are looked for."""
REASONING_TAGS = (
    ("<think>", "</think>"), ("<reasoning>", "</reasoning>"), ("<start_working_out>", "<end_working_out>"), ("<thinking>", "</thinking>"),
)  # fmt: skip
_MARK = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{|\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_HASHES = re.compile(r"####\s*(.+)")
_OWN_LINE = re.compile(r"^[ \t]{0,8}####([^\n]+)", re.MULTILINE)
_DENIED = re.compile(
    r"(?:\bnot|n't|\bnever|\bneither|\bnor|\\neq?|\\neg|≠|!=)[\s:$]*(?:(?:equal(?: to)?|be|is|=)[\s:$]*)?\Z",
    re.IGNORECASE,
)

_ENDS_OF_DENIAL = "tTrReEqQgGlLoOsS=≠"
"""Last letters of what ``_DENIED`` finds; most boxes follow something else."""


class Box(NamedTuple):
    """One brace-balanced ``\\boxed{…}``: where the command starts, and where its content starts and ends."""

    command: int
    start: int
    end: int


def find_boxes(text: str) -> tuple[list[Box], bool]:
    """Return all balanced boxes, outer and inner ones, by their start; and whether the last box is not closed."""
    last = [m.start() for m in _BOX.finditer(text, max(0, len(text) - MAX_COMPLETION))]
    if not last:
        return [], False
    open_braces: list[tuple[int, int]] = []  # (command, content), command -1 for a plain brace
    found: list[Box] = []
    newest = -1
    for mark in _MARK.finditer(text, last[0]):
        sign = mark[0]
        if len(sign) > 2:
            newest = mark.start()
            open_braces.append((newest, mark.end()))
        elif sign == "{":
            open_braces.append((-1, mark.end()))
        elif sign == "}" and open_braces:
            command, start = open_braces.pop()
            if command >= 0:
                found.append(Box(command, start, mark.start()))
    closed = {box.command for box in found}
    return sorted(found), newest not in closed or last[-1] > newest


def outermost(boxes: list[Box]) -> list[Box]:
    """Return the boxes that are in no other one."""
    found: list[Box] = []
    for box in boxes:
        if not found or box.command > found[-1].end:
            found.append(box)
    return found


def boxed(text: str) -> list[str]:
    """Return the contents of all brace-balanced ``\\boxed{…}`` and ``\\fbox{…}``, outermost ones, in order."""
    return [text[box.start : box.end] for box in outermost(find_boxes(text)[0])]


def last_boxed(text: str) -> str | None:
    """Return the content of the last ``\\boxed{}``, or None where there is none or it is not closed."""
    found, unclosed = find_boxes(text)
    return None if unclosed or not found else text[found[-1].start : found[-1].end]


def is_denied(text: str, place: int) -> bool:
    """Say whether what stands just before a place takes back what follows: ``not \\boxed{5}``."""
    before = text[max(0, place - 40) : place].rstrip(" :$\n\t")
    return before[-1:] in _ENDS_OF_DENIAL and bool(before) and bool(_DENIED.search(before))


def after_reasoning(text: str) -> str | None:
    """Return what follows the last closing reasoning tag; None if reasoning was opened and never closed."""
    place = -1
    opened = False
    for start, end in REASONING_TAGS:
        found = text.rfind(end)
        if found >= 0:
            place = max(place, found + len(end))
        opened = opened or text.rfind(start) > max(found, place)
    if place >= 0:
        return text[place:]
    return None if opened else text


def hash_answers(text: str, *, own_line: bool = False) -> list[str]:
    """Return what follows each ``####`` on its line, stripped; ``own_line`` wants the mark at the start of a line."""
    pattern = _OWN_LINE if own_line else _HASHES
    return [found.strip() for found in pattern.findall(text[-MAX_COMPLETION:])]


def hash_answer(text: str) -> str | None:
    """Return what follows the last ``####`` of a GSM8K solution, or None."""
    found = hash_answers(text)
    return found[-1] if found else None
