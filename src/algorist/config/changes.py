"""What may change between a run and its continuation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from algorist.errors import ConfigError


def check_same_run(before: str, after: str, path: Path) -> None:
    """Allow changes of length, logging and naming; refuse what would make the resumed run another run.

    Args:
        before: The run's ``config.yaml``.
        after: The recipe as it resolves now, as YAML.
        path: The run folder, for the message.

    Raises:
        ConfigError: Settings differ that decide what is learned; the message names them with both values.
    """
    free = "sft.max_steps sft.epochs grpo.max_steps grpo.epochs report_to tracking hub description".split()
    free_last = "logging_steps save_steps save_total_limit eval_every samples_every".split()
    old, new = flat(yaml.safe_load(before)), flat(yaml.safe_load(after))
    changed = [
        key
        for key in sorted(set(old) | set(new))
        if old.get(key) != new.get(key)
        and not key.startswith((*free, "eval.", "output_dir", "run_name"))
        and key.rpartition(".")[2] not in free_last
    ]
    if changed:
        lines = "\n".join(
            f"  {key}: {old.get(key)!r} in the run, {new.get(key)!r} now" for key in changed[:8]
        )
        raise ConfigError(
            f"{path} was started with other settings, so this would be another run:\n{lines}\n"
            "Use the same values to resume, or start a new run with run_name=NAME"
        )


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested keys as dotted ones."""
    if isinstance(value, dict):
        return {
            k: v
            for key, inner in value.items()
            for k, v in flat(inner, f"{prefix}.{key}" if prefix else key).items()
        }
    return {prefix: value}
