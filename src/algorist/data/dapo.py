"""DAPO-Math-17k: integer answers, no solutions; the instructions that copies of it put around a problem are removed."""

from __future__ import annotations

import re
from typing import Any

from algorist.data.base import Source, dataset
from algorist.data.cleaning import plain_number, require_columns
from algorist.data.columns import ground_truth, load_source, to_problems
from algorist.data.files import Row
from algorist.types import Problem

BEFORE = re.compile(r"\A\s*Solve the following math problem step by step\..*?\n\n", re.DOTALL)
AFTER = re.compile(
    r"\n\n(?:Remember to put your answer on its own line|Please reason step by step).*\Z", re.DOTALL
)


@dataset("dapo")
def load_dapo(source: Source) -> list[Problem]:
    """DAPO-Math-17k (open-r1/DAPO-Math-17k-Processed, en): the plain problem and its answer.

    Reads ``answer``, else ``solution``, else ``reward_model.ground_truth``; the prompt may be a text or messages.
    """
    rows = load_source(source, hub="open-r1/DAPO-Math-17k-Processed", subset="en", where="dapo")
    require_columns(
        rows, ("prompt", "problem", "question"), ("answer", "solution", "reward_model"), where="dapo"
    )
    return to_problems(
        rows,
        where="dapo",
        question=lambda row: plain_problem(row.get("prompt") or row.get("problem") or row.get("question")),
        answer=lambda row: plain_number(_gold(row)),
        identity=lambda row: (row.get("extra_info") or {}).get("index"),
    )


def plain_problem(prompt: Any) -> str:
    """Return the problem of a prompt (text, or chat messages, of which the last user message counts) by itself."""
    if isinstance(prompt, list):
        messages = [m for m in prompt if isinstance(m, dict)]
        asked = [str(m.get("content") or "") for m in messages if m.get("role") == "user"]
        prompt = asked[-1] if asked else ""
    return AFTER.sub("", BEFORE.sub("", str(prompt or ""))).strip()


def _gold(row: Row) -> Any:
    for name in ("answer", "solution"):
        if row.get(name) not in (None, ""):
            return row[name]
    return ground_truth(row)
