"""Logs of inspect_ai: ``algorist eval … --export inspect FOLDER`` writes one for ``inspect view``, ``algorist compare`` reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from algorist.evaluation.doors import exporter, importer


@exporter("inspect")
def _export(artifact: Any, folder: Path, task: str) -> Path:
    from algorist.extensions.inspect_log.write import export_inspect

    return export_inspect(artifact, folder, task)


@importer("inspect", "*.eval", "*.json")
def _import(path: Path) -> Any:
    from algorist.extensions.inspect_log.read import read_log

    return read_log(path)
