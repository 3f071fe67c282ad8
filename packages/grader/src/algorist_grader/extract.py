"""The final answer of a completion in free form: one documented order, strict where a completion says two things.

Order: what follows the reasoning → an answer block (``<answer>``, ``<SOLUTION>``) → the last ``\\boxed{}`` →
``#### N`` → "the answer is …" → (only if asked) the last number. The first marker that occurs decides; two different answers
under it are ambiguous. An answer that is only inside the reasoning is no answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from algorist_grader.markers import (
    MAX_COMPLETION,
    MOST_ANSWERS,
    Box,
    after_reasoning,
    answer_blocks,
    find_boxes,
    hash_answers,
    is_denied,
    last_boxed,
    outermost,
)
from algorist_grader.symbolic import Limits, symbolic

_BLOCKS = (("<answer>", "</answer>"), ("<SOLUTION>", "</SOLUTION>"))
_PHRASE = re.compile(
    r"(?:\banswer[ \t]{0,4}(?:is|are|=|:){1,3}[ \t]{0,4}:?|^[ \t]{0,8}A[ \t]{0,4}:)(?P<a>[^\n]+)",
    re.IGNORECASE | re.MULTILINE,
)
_OR = re.compile(
    r"[\s$*]*\bor\s+(?:maybe\s+|perhaps\s+|possibly\s+)?\$?(-?\d[\d.,/]*(?<![.,])|-?\\[dt]?frac\{[^{}]*\}\{[^{}]*\})"
)
_NUMBER = re.compile(r"[-+−]?\$?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?%?")


@dataclass(frozen=True, slots=True)
class Extraction:
    """The answer read from a completion (None: no answer), which marker gave it, and whether it said two things."""

    answer: str | None
    marker: str = ""
    ambiguous: bool = False


def decided(candidates: list[str], marker: str) -> Extraction:
    """Take the last of the candidates if they all say the same."""
    texts = [c.strip() for c in candidates if c.strip()]
    if not texts:
        return Extraction(None, marker)
    if len(texts) > MOST_ANSWERS:
        return Extraction(texts[-1], marker, ambiguous=True)
    if len({re.sub(r"\s+", "", c) for c in texts}) == 1:
        return Extraction(texts[-1], marker)
    same = len(texts) <= 8 and all(symbolic(c, texts[-1], Limits(), slow=False)[0] for c in texts[:-1])
    return Extraction(texts[-1], marker, ambiguous=not same)


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
        return decided(hashes, "####")
    phrases = [match["a"].strip().rstrip(".") for match in _PHRASE.finditer(body)]
    if phrases:
        return decided(phrases, "the answer is")
    if last_number:
        numbers = _NUMBER.findall(body)
        if numbers:
            return Extraction(numbers[-1].strip(), "last number")
    return Extraction(None)


def last_number(text: str) -> str | None:
    """Return the last number of a text wherever it is, without the comma of a sentence; None where there is none."""
    numbers = _NUMBER.findall(text[-MAX_COMPLETION:])
    return numbers[-1].strip().rstrip(",") if numbers else None


def _from_blocks(body: str, start: str, end: str) -> Extraction:
    answer = decided(answer_blocks(body, start, end), start)
    inner = last_boxed(answer.answer) if answer.answer and "\\boxed" in answer.answer else None
    return Extraction(inner, start, answer.ambiguous) if inner is not None else answer


def from_boxes(body: str) -> tuple[Extraction, list[Box]]:
    """Return the answer that the boxes after the reasoning agree on, and those boxes.

    A last box that is not closed, or that the text around it takes back or changes, is no answer; what "or" adds is another.
    """
    all_boxes, unclosed = find_boxes(body)
    outer = outermost(all_boxes)
    boxes = [b for b in outer if len(outer) > MOST_ANSWERS or not is_denied(body, b.command, b.end)]
    if unclosed or not all_boxes:
        return Extraction(None, "unclosed box"), boxes
    if not boxes or boxes[-1] != outer[-1]:
        return Extraction(None, "denied box"), boxes
    others = [match[1] for box in boxes if (match := _OR.match(body, box.end + 1))]
    return decided([*others, *(body[box.start : box.end] for box in boxes)], "\\boxed"), boxes
