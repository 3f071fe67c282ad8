"""What a diagnosis says: a cause by name, one sentence, the numbers, a few completions and the YAML to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from algorist.store.safe_text import one_line


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion as evidence; texts are shown with control characters escaped."""

    step: int
    problem_id: str
    completion: str
    extracted: str | None
    gold: str | None
    reason: str | None
    reward: float
    tokens: int

    def told(self, width: int = 240) -> str:
        """Return the completion on one line, its middle left out where it is longer than ``width`` characters."""
        text = one_line(self.completion)
        if len(text) > width:
            text = f"{text[: width // 2]} … {text[-width // 2 :]}"
        read = one_line(str(self.extracted), 40) if self.extracted is not None else "nothing"
        gold = one_line(str(self.gold), 40)
        return (
            f"step {self.step}, problem {one_line(self.problem_id, 24)}: {text}  "
            f"[read {read}, gold {gold}, {self.reason}, reward {self.reward:.3g}, {self.tokens} tokens]"
        )


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
        shown: tuple[str, ...] = ()
        for name, value in new.items():
            *parents, key = name.split("__")
            now = self.get(".".join([*parents, key]))
            if now == value:
                continue
            same = 0
            while same < min(len(parents), len(shown)) and parents[same] == shown[same]:
                same += 1
            lines += [f"{'  ' * depth}{parents[depth]}:" for depth in range(same, len(parents))]
            shown = tuple(parents)
            remark = f"  # is {_flow(now)}" if now is not None else ""
            lines.append(f"{'  ' * len(parents)}{key}: {_flow(value)}{remark}")
        return "\n".join(lines)


def _flow(value: Any) -> str:
    if isinstance(value, float):
        # 1e-05 is text to YAML; 1.0e-05 is a number.
        text = repr(value)
        return text if "e" not in text or "." in text else text.replace("e", ".0e")
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
    return text.removesuffix("...").strip()
