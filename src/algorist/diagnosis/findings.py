"""What a diagnosis says: a cause by name, one sentence, the numbers, a few completions and the YAML to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from algorist.config.yaml_text import one_line_yaml


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause that was found.

    ``severity`` orders findings: 1 nothing can be learned, 2 training does harm, 3 training is slower or worse than it
    need be. ``change`` is YAML for a recipe; the values in force stand behind ``# is``.
    """

    name: str
    sentence: str
    severity: int
    evidence: tuple[str, ...]
    samples: tuple[str, ...]
    change: str
    stage: str = "grpo"

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)

    def one_line(self) -> str:
        """Return the line shown once during training."""
        return f"{self.name}: {self.sentence} {self.evidence[0] if self.evidence else ''}".rstrip()


class Settings:
    """A recipe's values by dotted path; also of a recipe that this version can no longer load."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self.values = dict(values or {})

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at ``a.b.c``, or ``default``."""
        found: Any = self.values
        for key in path.split("."):
            if not isinstance(found, Mapping) or key not in found:
                return default
            found = found[key]
        return default if found is None else found

    def number(self, path: str, default: float) -> float:
        """Return the value at ``path`` as a number, or ``default`` where it is none (YAML reads 1e-6 as text)."""
        try:
            return float(self.get(path, default))
        except (TypeError, ValueError):
            return default

    def change(self, **new: Any) -> str:
        """Return YAML that sets ``section__key=value``, what is so already left out; the value in force is behind each line."""
        lines: list[str] = []
        shown: list[str] = []
        for name, value in new.items():
            *parents, key = name.split("__")
            now = self.get(name.replace("__", "."))
            if now == value:
                continue
            for depth, parent in enumerate(parents):
                if shown[: depth + 1] != parents[: depth + 1]:
                    lines.append(f"{'  ' * depth}{parent}:")
            shown = parents
            remark = f"  # is {one_line_yaml(now)}" if now is not None else ""
            lines.append(f"{'  ' * len(parents)}{key}: {one_line_yaml(value)}{remark}")
        return "\n".join(lines)
