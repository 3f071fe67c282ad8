"""What the grader takes and gives: a completion read by a prompt format, and the verdict on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Parsed:
    """A completion read by its prompt format.

    ``answer`` is None when the completion has no answer block. ``well_formed`` means that the completion follows the
    format exactly; ``flags`` names what is odd about it (``repeated_tag``, ``text_after``, ``several_answers``, …).
    """

    reasoning: str | None
    answer: str | None
    well_formed: bool
    flags: tuple[str, ...] = ()


GradeReason = Literal[
    "equal_string",
    "equal_number",
    "equal_symbolic",
    "checked",
    "different",
    "no_answer",
    "no_reasoning_close",
    "no_answer_open",
    "no_answer_close",
    "ambiguous",
    "unparseable_answer",
    "unparseable_gold",
    "timeout",
    "memory",
    "crashed",
]


MISSING_TAG: dict[str, GradeReason] = {
    "unclosed_reasoning": "no_reasoning_close",
    "unopened_answer": "no_answer_open",
    "unclosed_answer": "no_answer_close",
}
"""Flag of a completion whose answer cannot be read for want of one tag → the reason: ``no_`` and the tag's name."""
UNFINISHED = frozenset({"timeout", "memory", "crashed"})
"""Reasons of verdicts that a limit cut short: asked again, the grader may decide."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one completion: ``correct``, why, what was read, the gold answer, and the time it took."""

    correct: bool
    reason: GradeReason
    extracted: str | None
    gold: str
    seconds: float = 0.0

    @property
    def is_unfinished(self) -> bool:
        """Whether a limit or the end of the grader's process cut it short."""
        return self.reason in UNFINISHED
