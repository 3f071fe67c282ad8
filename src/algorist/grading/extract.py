"""The final answer of a completion in free form: one documented order, strict where a completion says two things.

Order: what stands behind the reasoning → an answer block (``<answer>``, ``<SOLUTION>``) → the last ``\\boxed{}`` →
``#### N`` → "the answer is …" → (only if asked) the last number. The first marker that occurs decides; two different answers
under it are ambiguous. An answer that stands only inside the reasoning is no answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from algorist.grading.text import closing_brace

_REASONING = (
    ("<think>", "</think>"), ("<reasoning>", "</reasoning>"), ("<start_working_out>", "<end_working_out>"), ("<thinking>", "</thinking>"),
)  # fmt: skip
_BLOCKS = (("<answer>", "</answer>"), ("<SOLUTION>", "</SOLUTION>"))
_HASHES = re.compile(r"^[ \t]{0,8}####([^\n]+)", re.MULTILINE)
_PHRASE = re.compile(
    r"(?:\banswer[ \t]{0,4}(?:is|are|=|:){1,3}[ \t]{0,4}:?|^[ \t]{0,8}A[ \t]{0,4}:)(?P<a>[^\n]+)",
    re.IGNORECASE | re.MULTILINE,
)
_NUMBER = re.compile(r"[-+−]?\$?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?%?")
MAX_COMPLETION = 200_000


@dataclass(frozen=True, slots=True)
class Extraction:
    """The answer read from a completion (None: no answer), which marker gave it, and whether it said two things."""

    answer: str | None
    marker: str = ""
    ambiguous: bool = False


def boxed(text: str) -> list[str]:
    """Return the contents of all brace-balanced ``\\boxed{…}`` and ``\\fbox{…}``, outermost ones, in order."""
    found: list[str] = []
    position = 0
    for match in re.finditer(r"\\(?:boxed|fbox)\s*(?=\{)", text):
        if match.start() < position:
            continue
        close = closing_brace(text, match.end())
        if close < 0:
            break
        found.append(text[match.end() + 1 : close])
        position = close
    return found


def last_boxed(text: str) -> str | None:
    """Return the content of the last brace-balanced ``\\boxed{}``, or None."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\boxed {"))
    if start < 0:
        return None
    opened = text.index("{", start)
    close = closing_brace(text, opened)
    return text[opened + 1 : close] if close >= 0 else None


def _behind_reasoning(text: str) -> str | None:
    """Return what stands behind the last closing reasoning tag; None if reasoning was opened and never closed."""
    place = -1
    opened = False
    for start, end in _REASONING:
        found = text.rfind(end)
        if found >= 0:
            place = max(place, found + len(end))
        opened = opened or text.rfind(start) > max(found, place)
    if place >= 0:
        return text[place:]
    return None if opened else text


def _decided(candidates: list[str], marker: str) -> Extraction:
    """Take the last of the candidates if they all say the same."""
    kept = [c.strip() for c in candidates if c.strip()]
    if not kept:
        return Extraction(None, marker)
    if len({re.sub(r"\s+", "", c) for c in kept}) == 1:
        return Extraction(kept[-1], marker)
    from algorist.grading.ladder import Limits, symbolic

    same = len(kept) <= 8 and all(symbolic(c, kept[-1], Limits(), slow=False)[0] for c in kept[:-1])
    return Extraction(kept[-1], marker, ambiguous=not same)


def extract(text: str, *, last_number: bool = False) -> Extraction:
    """Return the final answer of a completion in free form.

    Args:
        text: The completion; only its last ``MAX_COMPLETION`` characters are looked at.
        last_number: Take the last number where no marker occurs (lenient; off by default).
    """
    body = _behind_reasoning(text[-MAX_COMPLETION:])
    if body is None:
        return Extraction(None, "unfinished reasoning")
    for start, end in _BLOCKS:
        if start in body:
            parts = body.split(start)[1:]
            blocks = [part.partition(end)[0] for part in parts if end in part]
            if not blocks:
                return Extraction(None, "unclosed answer block")
            found = _decided(blocks, start)
            inner = last_boxed(found.answer) if found.answer and "\\boxed" in found.answer else None
            return Extraction(inner, start, found.ambiguous) if inner is not None else found
    boxes = boxed(body)
    if boxes:
        return _decided(boxes, "\\boxed")
    if "\\boxed" in body:
        return Extraction(None, "unclosed box")
    hashes = _HASHES.findall(body)
    if hashes:
        return _decided(hashes, "####")
    phrases = [match["a"].strip().rstrip(".") for match in _PHRASE.finditer(body)]
    if phrases:
        return _decided(phrases, "the answer is")
    if last_number:
        numbers = _NUMBER.findall(body)
        if numbers:
            return Extraction(numbers[-1].strip(), "last number")
    return Extraction(None)
