"""The final answer of a completion in free form: one documented order, strict where a completion says two things.

Order: what follows the reasoning → an answer block (``<answer>``, ``<SOLUTION>``) → the last ``\\boxed{}`` →
``#### N`` → "the answer is …" → (only if asked) the last number. The first marker that occurs decides; two different answers
under it are ambiguous. An answer that stands only inside the reasoning is no answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from algorist.grading.markers import (
    MAX_COMPLETION,
    Box,
    after_reasoning,
    find_boxes,
    hash_answers,
    is_denied,
    last_boxed,
    outermost,
)
from algorist.grading.symbolic import Limits, symbolic

_BLOCKS = (("<answer>", "</answer>"), ("<SOLUTION>", "</SOLUTION>"))
_PHRASE = re.compile(
    r"(?:\banswer[ \t]{0,4}(?:is|are|=|:){1,3}[ \t]{0,4}:?|^[ \t]{0,8}A[ \t]{0,4}:)(?P<a>[^\n]+)",
    re.IGNORECASE | re.MULTILINE,
)
_NUMBER = re.compile(r"[-+−]?\$?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?%?")


@dataclass(frozen=True, slots=True)
class Extraction:
    """The answer read from a completion (None: no answer), which marker gave it, and whether it said two things."""

    answer: str | None
    marker: str = ""
    ambiguous: bool = False


def _decided(candidates: list[str], marker: str) -> Extraction:
    """Take the last of the candidates if they all say the same."""
    kept = [c.strip() for c in candidates if c.strip()]
    if not kept:
        return Extraction(None, marker)
    if len({re.sub(r"\s+", "", c) for c in kept}) == 1:
        return Extraction(kept[-1], marker)
    same = len(kept) <= 8 and all(symbolic(c, kept[-1], Limits(), slow=False)[0] for c in kept[:-1])
    return Extraction(kept[-1], marker, ambiguous=not same)


def extract(text: str, *, last_number: bool = False) -> Extraction:
    """Return the final answer of a completion in free form.

    Args:
        text: The completion; only its last ``MAX_COMPLETION`` characters are looked at.
        last_number: Take the last number where no marker occurs (lenient; off by default).
    """
    body = after_reasoning(text)
    if body is None:
        return Extraction(None, "unfinished reasoning")
    body = body[-MAX_COMPLETION:]
    for start, end in _BLOCKS:
        if start in body:
            return _from_blocks(body, start, end)
    if "\\boxed" in body or "\\fbox" in body:
        return from_boxes(body)[0]
    hashes = hash_answers(body, own_line=True)
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


def last_number(text: str) -> str | None:
    """Return the last number of a text wherever it stands, without the comma of a sentence; None where there is none."""
    numbers = _NUMBER.findall(text[-MAX_COMPLETION:])
    return numbers[-1].strip().rstrip(",") if numbers else None


def _from_blocks(body: str, start: str, end: str) -> Extraction:
    blocks = [part.partition(end)[0] for part in body.split(start)[1:] if end in part]
    if not blocks:
        return Extraction(None, "unclosed answer block")
    found = _decided(blocks, start)
    inner = last_boxed(found.answer) if found.answer and "\\boxed" in found.answer else None
    return Extraction(inner, start, found.ambiguous) if inner is not None else found


def from_boxes(body: str) -> tuple[Extraction, list[Box]]:
    """Return the answer that the boxes after the reasoning agree on, and those boxes.

    A last box that is not closed, or that is taken back ("not" before it), is no answer.
    """
    found, unclosed = find_boxes(body)
    boxes = [box for box in outermost(found) if not is_denied(body, box.command)]
    if unclosed or not found:
        return Extraction(None, "unclosed box"), boxes
    if not boxes or is_denied(body, found[-1].command):
        return Extraction(None, "denied box"), boxes
    return _decided([body[box.start : box.end] for box in boxes], "\\boxed"), boxes
