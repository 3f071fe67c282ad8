"""Where each value of a resolved recipe comes from, and what each key means."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel

from algorist.config.load import LoadedRecipe
from algorist.config.schema import Recipe


class _Dumper(yaml.SafeDumper):
    """Escapes the line ends that only YAML knows; as they are, they would be read back as blanks."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = '"' if any(c in text for c in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(recipe: Recipe) -> str:
    """Return the recipe as YAML that ``load_recipe`` reads back to the same recipe."""
    values = recipe.model_dump(mode="json")
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def explain(loaded: LoadedRecipe) -> list[tuple[str, Any, str]]:
    """Return (dotted key, value, origin) for every leaf; the origin is a file, ``command line`` or ``default``."""
    rows: list[tuple[str, Any, str]] = []
    _walk(loaded.recipe.model_dump(mode="json"), "", loaded.origins, rows)
    return rows


def describe(dotted: str) -> str:
    """Return the documentation of a key, or an empty string."""
    model: type[BaseModel] | None = Recipe
    text = ""
    for part in dotted.split("."):
        info = model.model_fields.get(part) if model else None
        if info is None:
            return text
        text = info.description or ""
        model = (
            info.annotation
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
            else None
        )
    return text


def _walk(value: Any, prefix: str, origins: dict[str, str], rows: list[tuple[str, Any, str]]) -> None:
    if isinstance(value, dict) and value and prefix not in origins:
        for key, inner in value.items():
            _walk(inner, f"{prefix}.{key}" if prefix else key, origins, rows)
        return
    rows.append((prefix, value, origins.get(prefix, "default")))
