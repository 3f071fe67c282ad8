"""Nothing but the question; the answer is the last ``\\boxed{}`` of the completion, after any reasoning block."""

from __future__ import annotations

from algorist.grading.extract import from_boxes
from algorist.grading.markers import after_reasoning
from algorist.prompts.base import PromptFormat, Tags, add_format
from algorist.types import Parsed


class QuestionOnly(PromptFormat):
    """The prompt is the bare question; a completion is well formed when it has exactly one distinct box."""

    def demonstrate(self, reasoning: str, answer: str) -> str:
        """Return the reasoning followed by the boxed answer."""
        return f"{reasoning.strip()}\n\\boxed{{{answer.strip()}}}"

    def parse(self, text: str) -> Parsed:
        """Read the last balanced box after the reasoning; boxes that say different things are flagged ``several_answers``."""
        body = after_reasoning(text)
        if body is None:
            return Parsed(text.strip() or None, None, False, ("unfinished_reasoning",))
        answer, boxes = from_boxes(body)
        if answer.answer is None:
            flag = "unclosed_answer" if "\\boxed" in body and not boxes else "no_answer"
            return Parsed(text.strip() or None, None, False, (flag,))
        reasoning = text[: len(text) - len(body) + boxes[-1].command].strip()
        distinct = {body[box.start : box.end].strip() for box in boxes}
        flags = ("several_answers",) if answer.ambiguous else ()
        return Parsed(reasoning or None, answer.answer, len(distinct) == 1, flags)


QUESTION_ONLY = add_format(QuestionOnly(name="question_only", tags=Tags(), raw_template="{question}"))
