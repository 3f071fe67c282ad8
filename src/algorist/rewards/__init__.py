"""Rewards."""
from __future__ import annotations
from typing import Any
from algorist.grading import grade_completion

class Simple:
    def __init__(self, name, fn): self.__name__, self.fn = name, fn
    def __call__(self, *, completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [self.fn(c if isinstance(c, str) else c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]

def build_rewards(specs: Any, prompt_format: Any, *, matcher: str) -> list[Any]:
    table = {"correct": lambda t, a: float(grade_completion(t, a, parsed=prompt_format.parse(t), matcher=matcher).correct),
             "well_formed": lambda t, a: float(prompt_format.parse(t).well_formed)}
    return [Simple(s.name, table[s.name]) for s in specs]
