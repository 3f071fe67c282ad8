"""Does a model know a benchmark by heart? ``algorist eval … --probe memory``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from algorist.evaluation.doors import Probed, probe
from algorist.types import Problem


@probe("memory")
def _probe(
    engine: Any, tokenizer: Any, problems: Sequence[Problem], on_progress: Callable[[int, int], None] | None
) -> Probed:
    from algorist.extensions.memory_probe.probe import memory_json, memory_lines, probe_memory

    memory = probe_memory(engine, tokenizer, problems, on_progress=on_progress)
    return Probed(memory_json(memory), memory.rows, memory_lines(memory))
