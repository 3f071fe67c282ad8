"""Samples in the form of lm-evaluation-harness: ``algorist eval … --export lm-eval FOLDER`` writes them, ``algorist compare`` reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from algorist.evaluation.doors import exporter, importer


@exporter("lm-eval")
def _export(artifact: Any, folder: Path, task: str) -> Path:
    from algorist.extensions.lm_eval.samples import export_harness

    return export_harness(artifact, folder, task=task)


@importer("lm-eval", "*.jsonl")
def _import(path: Path) -> Any:
    from algorist.extensions.lm_eval.read import read_samples

    return read_samples(path)
