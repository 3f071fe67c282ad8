"""A model as a folder of its own, with its card: what is exported, uploaded, and what a round of expert iteration starts from."""

from __future__ import annotations

from pathlib import Path

from algorist.errors import ConfigError


def check_new(target: Path) -> None:
    """Refuse a folder that holds something.

    Raises:
        ConfigError: It is there already and not empty, or a file.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already and not empty; give --to another folder")
