"""A completion as the row that ``solve`` gives: the same from a model in this process and from a server."""

from __future__ import annotations

from typing import Any

from algorist.prompts.base import PromptFormat


def answer_row(
    prompt_format: PromptFormat, question: str, completion: str, *, truncated: bool
) -> dict[str, Any]:
    """Return question, completion, reasoning, answer, well_formed and truncated."""
    parsed = prompt_format.parse(completion)
    return {
        "question": question,
        "completion": completion,
        "reasoning": parsed.reasoning,
        "answer": parsed.answer,
        "well_formed": parsed.well_formed,
        "truncated": truncated,
    }
