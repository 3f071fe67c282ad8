"""A completion as the row that ``solve`` gives: the same from a model in this process and from a server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from algorist.types import Rollout


def answer_row(question: str, rollout: Rollout) -> dict[str, Any]:
    """Return question, completion, reasoning, answer, well_formed and truncated."""
    return {
        "question": question,
        "completion": rollout.text,
        "reasoning": rollout.parsed.reasoning,
        "answer": rollout.parsed.answer,
        "well_formed": rollout.parsed.well_formed,
        "truncated": rollout.truncated,
        **({"turns": [asdict(turn) for turn in rollout.turns]} if rollout.turns else {}),
    }
