"""An evaluation as a log of inspect_ai, for ``inspect view``: ``algorist eval … --export inspect FOLDER``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from algorist.evaluation.doors import exporter


@exporter("inspect")
def _export(artifact: Any, folder: Path, task: str) -> Path:
    from algorist.extensions.inspect_log.write import export_inspect

    return export_inspect(artifact, folder, task)
