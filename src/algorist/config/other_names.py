"""Names of our settings in other programs: a key or option of theirs is answered with ours. They are in ``other_names.yaml``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import yaml


@cache
def _table() -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    return table


def trl_names() -> dict[str, str]:
    """Return TRL's name of an argument → its key below ``grpo`` in a recipe."""
    return _table()["trl"]


def other_names() -> dict[str, str]:
    """Return their name of a setting → ours."""
    return {theirs: f"grpo.{ours}" for theirs, ours in trl_names().items()} | _table()["others"]


def ours_for(name: str, section: str = "", keys: Iterable[str] = ()) -> str:
    """Return ``" Here it is grpo.group_size=VALUE."`` for a name of another program, or an empty string.

    Args:
        name: Their key or option.
        section: Where it was written; its own key is named if it is among ``keys``.
        keys: The section's keys.
    """
    key = other_names().get(name.lstrip("-").replace("-", "_"))
    if key is None:
        return ""
    if section.partition(".")[0] == "eval":
        key = key.replace("data.train.", "data.eval.")
    home, _, last = key.rpartition(".")
    if section and last in keys and "." not in home:
        key = f"{section}.{last}"
    return f" Here it is {key if '=' in key or ' ' in key else f'{key}=VALUE'}."
