"""A recipe's values by dotted path: what the recipe of a run said, in whatever version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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

    def rewards(self) -> list[dict[str, Any]]:
        """Return the rewards, each with its name."""
        return [{"name": r} if isinstance(r, str) else dict(r) for r in self.get("rewards") or []]

    def own_code(self) -> list[str]:
        """Return the user's own Python files, each as KEY=FILE:NAME."""
        from algorist.config.yaml_text import flat

        texts = [(key, value) for key, value in flat(self.values).items() if key != "rewards"]
        texts += [("rewards", reward["name"]) for reward in self.rewards()]
        return [
            f"{key}={one}"
            for key, value in texts
            for one in (value if isinstance(value, list) else [value])
            if isinstance(one, str) and (one.endswith(".py") or ".py:" in one)
        ]

    def changed(self, values: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return lines ``key=value`` without what is so already, and the value in force of each as text ("": none)."""
        # here, because extensions are read with the schema and bring rules
        from algorist.config.schema import RewardSection
        from algorist.config.yaml_text import one_line_yaml

        def short(value: Any) -> Any:
            if isinstance(value, list) and all(isinstance(r, Mapping) and "name" in r for r in value):
                return [RewardSection.model_validate(r).model_dump(exclude_defaults=True) for r in value]
            if isinstance(value, Mapping):
                return {name: part for name, part in value.items() if part not in (None, False, {}, [])}
            return value

        values = {key: short(value) for key, value in values.items()}
        now = {key: short(self.get(key)) for key in values}
        keys = [key for key, value in values.items() if now[key] != value]
        texts = tuple(one_line_yaml(now[key]) if now[key] is not None else "" for key in keys)
        return tuple(f"{key}={one_line_yaml(values[key])}" for key in keys), texts
