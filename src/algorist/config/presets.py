"""``grpo.preset``: lines of a recipe under one name, from ``recipes/presets/NAME.yaml``, each with its paper.

A preset counts where it is named: over what that recipe extends, under what the same file says. On the command line it counts over the
recipe and under the other settings of the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml


@dataclass(frozen=True)
class Preset:
    """Lines of a recipe under one name.

    Attributes:
        name: What ``grpo.preset`` says.
        paper: Its number on arXiv.
        description: What it is, and what of the paper it leaves out.
        lines: Section → key → value.
    """

    name: str
    paper: str
    description: str
    lines: dict[str, Any]

    @property
    def origin(self) -> str:
        """What is said of a value that comes from it."""
        return f"preset {self.name}, {self.paper}"


def preset_names() -> list[str]:
    """Return the names of all presets."""
    folder = resources.files("algorist.recipes") / "presets"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def preset_named(name: str) -> Preset:
    """Return a preset; its lines are the caller's to change."""
    text = (resources.files("algorist.recipes") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    return Preset(name, values.pop("paper"), values.pop("description"), values)


def preset_of(values: dict[str, Any]) -> Preset | None:
    """Return the preset that a recipe's values name; an unknown name is left to the schema, which says what is wrong with it."""
    section = values.get("grpo")
    name = section.get("preset") if isinstance(section, dict) else None
    return preset_named(name) if isinstance(name, str) and name in preset_names() else None
