"""Nothing but the question; the answer is the last ``\\boxed{}`` of the completion."""

from __future__ import annotations

import re

from algorist.prompts.base import PromptFormat, Tags, add_format
from algorist.types import Parsed


class QuestionOnly(PromptFormat):
    """The prompt is the bare question; a completion is well formed when it has exactly one distinct box."""

    def demonstrate(self, reasoning: str, answer: str) -> str:
        """Return the reasoning followed by the boxed answer."""
        return f"{reasoning.strip()}\n\\boxed{{{answer.strip()}}}"

    def parse(self, text: str) -> Parsed:
        """Read the last balanced box; boxes with different contents are flagged ``several_answers``."""
        spans = list(_boxes(text))
        if not spans:
            flag = "unclosed_answer" if "\\boxed" in text else "no_answer"
            return Parsed(text.strip() or None, None, False, (flag,))
        contents = {text[start:end].strip() for start, end in spans}
        flags = ("several_answers",) if len(contents) > 1 else ()
        start, end = spans[-1]
        reasoning = re.sub(r"\\boxed\s*\{?$", "", text[:start]).strip()
        return Parsed(reasoning or None, text[start:end].strip() or None, len(contents) == 1, flags)


def _boxes(text: str) -> list[tuple[int, int]]:
    """Return the content spans of all brace-balanced ``\\boxed{…}``."""
    spans = []
    for match in re.finditer(r"\\boxed\s*\{", text):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                spans.append((match.end(), position))
                break
    return spans


QUESTION_ONLY = add_format(QuestionOnly(name="question_only", tags=Tags(), raw_template="{question}"))
