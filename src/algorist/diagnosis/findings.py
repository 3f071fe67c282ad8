"""What a rule says of a run: a name, one sentence, the facts, a few completions and the lines of the recipe to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault that a run has.

    ``severity`` orders findings: 1 nothing can be learned, 2 training does harm, 3 training is slower or worse than it
    need be. ``change`` are lines as ``algorist run RECIPE`` takes them, ``before`` the values in force ("" where there is none).
    """

    name: str
    sentence: str
    severity: int
    evidence: tuple[str, ...]
    samples: tuple[str, ...] = ()
    change: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    stage: str = "grpo"
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary: name, stage, severity, explanation, evidence (fact, value, text), samples, change."""
        evidence = [
            {"fact": name, "value": value, "text": text}
            for (name, value), text in zip(self.facts.items(), self.evidence, strict=True)
        ]
        return {
            "name": self.name,
            "stage": self.stage,
            "severity": self.severity,
            "explanation": self.sentence,
            "evidence": evidence,
            "samples": list(self.samples),
            "change": list(self.change),
        }

    def one_line(self) -> str:
        """Return the line shown once during training."""
        return f"{self.name}: {self.sentence} {self.evidence[0] if self.evidence else ''}".rstrip()


class Settings:
    """A recipe's values by dotted path; also of a recipe that this version can no longer load."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self.values = dict(values or {})

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at ``a.b.c``, or ``default``."""
        value: Any = self.values
        for key in path.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return default
            value = value[key]
        return default if value is None else value

    def number(self, path: str, default: float) -> float:
        """Return the value at ``path`` as a number, or ``default`` where it is none (YAML reads 1e-6 as text)."""
        try:
            return float(self.get(path, default))
        except (TypeError, ValueError):
            return default

    def changed(self, values: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return lines ``key=value`` without what is so already, and the value in force of each as text ("": none)."""
        from algorist.config.yaml_text import (
            one_line_yaml,
        )  # here, because extensions are read with the schema and bring rules

        now = {key: self.get(key) for key in values}
        keys = [key for key, value in values.items() if now[key] != value]
        texts = tuple(one_line_yaml(now[key]) if now[key] is not None else "" for key in keys)
        return tuple(f"{key}={one_line_yaml(values[key])}" for key in keys), texts
