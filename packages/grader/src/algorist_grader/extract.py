"""The final answer of a completion in free form: one documented order, strict where a completion says two things.

Order: what follows the reasoning → an answer block (``<answer>``, ``<SOLUTION>``) → the last ``\\boxed{}`` →
``#### N`` → "the answer is …" → (only if asked) the last number. The first marker that occurs decides; two different answers
under it are ambiguous. An answer that is only inside the reasoning is no answer.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from algorist_grader.markers import (
    MAX_COMPLETION,
    MOST_ANSWERS,
    Box,
    after_reasoning,
    after_thinking,
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
    r"(?:\banswer(?: to (?:the|this) (?:problem|question))?[ \t*]{0,4}(?:is|are|=|:|(?:would|must|should) be){1,3}[ \t*]{0,4}:?[ \t*]{0,4}\n?"
    r"|^[ \t]{0,8}A[ \t]{0,4}:|^#{1,4}[ \t]{0,4}(?:Final )?Answer:?[ \t]*\n{1,3})(?P<a>[^\n]+)",
    re.IGNORECASE | re.MULTILINE,
)
_TAIL = re.compile(
    r"(?:,|\.|!)?\s+(?:because|since|as|\(see|which|\(as)\b.*|,\s+[a-z]{2,}(?<!and)(?<!or)\b[^,]*|[.!]\s+[A-Z].*"
)
"""Text after a value in its sentence, or in the next one."""
_DOUBT = re.compile(
    r"\b(?:or|maybe|perhaps|possibly|not|no|never|wait|actually|but|however|either|unless|wrong|incorrect|hmm|instead|rather|correction|oops|sorry|mistake|error"
    r"|except|also|and|plus|minus|times|more|less|otherwise)\b|n't\b",
    re.IGNORECASE,
)
_CORRECTED = re.compile(
    r"[\s$*.,;:!)\]-]*(?:wait|actually|hmm+|no|oops|sorry|correction|i made an? (?:error|mistake))\b[^\n]{0,80}?"
    r"(?:\b(?:is|be|it's|get|answer|equals?)\b|:|=)\s*(?:actually |really )?\$?(?P<value>-?(?:\d[\d.,/]*(?<![.,])|\\[dt]?frac\{[^{}]*\}\{[^{}]*\}))",
    re.IGNORECASE,
)
"""A box that is taken back in the next sentence, which says another value."""
_BETWEEN = re.compile(
    r"[\s$*]*(?:\\[)\]])?[\s$*]*(?:,|and\b|or\b|,\s*and\b|,\s*or\b)[\s$*]*(?:\\[(\[])?[\s$*]*"
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
    phrases = [_value_of(match["a"]) for match in _PHRASE.finditer(body)]
    if phrases:
        return decided(phrases, "the answer is")
    if last_number:
        numbers = _NUMBER.findall(body)
        if numbers:
            return Extraction(numbers[-1].strip(), "last number")
    return Extraction(None)


def in_tags(
    text: str, reasoning_open: str, reasoning_close: str, answer_open: str, answer_close: str
) -> Extraction:
    """Return the answer between its own tags, after the reasoning in its tags."""
    rest = after_thinking(text.rpartition(reasoning_close)[2].partition(reasoning_open)[0])
    return decided(answer_blocks(rest or "", answer_open, answer_close), answer_open)


def in_boxes(text: str) -> Extraction:
    """Return the answer in the last box after the reasoning."""
    return from_boxes(after_reasoning(text) or "")[0]


def _value_of(phrase: str) -> str:
    """Return the value of ``52, as wanted`` and ``52 because …``; all of it where what follows may doubt or add to the value."""
    phrase = re.sub(r"\*{1,3}\s*\Z", "", phrase.strip()).rstrip(".")
    tail = _TAIL.search(phrase)
    if tail is None:
        return phrase
    value, rest = phrase[: tail.start()].rstrip(" ,"), tail[0]
    is_letter = bool(re.fullmatch(r"\(?[A-J]\)?", value))
    others = set(re.findall(r"\b[A-HJ]\b" if is_letter else r"\d[\d.,/]*(?<![.,])", rest)) - {
        value.strip("$ ()")
    }
    explained = rest.lstrip(" ,.!").startswith(("because", "since"))
    has_value = is_letter or re.search(r"\d", value)
    return phrase if not has_value or _DOUBT.search(rest) or (others and not explained) else value


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
    if corrected := _CORRECTED.match(body, boxes[-1].end + 1):
        others.append(corrected["value"])
    if not others and (several := _several(body, boxes)):
        return Extraction(several, "\\boxed"), boxes
    return decided([*others, *(body[box.start : box.end] for box in boxes)], "\\boxed"), boxes


def _several(body: str, boxes: list[Box]) -> str:
    """Return ``3, 5`` for ``\\boxed{3}, \\boxed{5}``: boxes side by side that are all there are, and say different things."""
    texts = [body[box.start : box.end].strip() for box in boxes]
    if not 1 < len(boxes) <= 8 or len(set(texts)) < len(texts) or not all(texts):
        return ""
    gaps = itertools.pairwise(boxes)
    return (
        ", ".join(texts)
        if all(_BETWEEN.fullmatch(body, one.end + 1, other.command) for one, other in gaps)
        else ""
    )
