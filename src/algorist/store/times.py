"""Seconds of a run by kind: loading, evaluation, saving, the steps of its stages; and its use of the machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from algorist.store.run_folder import RunFolder
from algorist.system import own_memory, processor_seconds

FILE = "times.json"


class Times:
    """Seconds by what they went to; what is done within something else counts there alone."""

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self.seconds = dict(before or {})
        self.began = time.monotonic()
        self._within = [0.0]

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Add the seconds of a block to those of ``name``."""
        began = time.monotonic()
        self._within.append(0.0)
        try:
            yield
        finally:
            took = time.monotonic() - began
            self.add(name, took - self._within.pop())
            self._within[-1] += took

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to those of ``name``."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class Took:
    """Resources that a run uses from now on; of a run that is continued only the memory is known.

    The memory is that of one process; the processor's minutes are not known where there are several.
    """

    def __init__(self, resumed: bool) -> None:
        self.resumed, self.began, self.cpu = resumed, time.monotonic(), processor_seconds()

    def until_now(self) -> dict[str, float | None]:
        minutes = (time.monotonic() - self.began) / 60
        processor = (processor_seconds() - self.cpu) / 60
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        torch = sys.modules.get("torch")
        gpu = torch.cuda.max_memory_allocated() if torch else 0
        return {
            "minutes": None if self.resumed else round(minutes, 2),
            "processor_minutes": round(processor, 2) if alone and not self.resumed else None,
            "peak_memory_gib": round(own_memory(peak=True) / 2**30, 2),
            "peak_gpu_memory_gib": round(gpu / 2**30, 2) if gpu else None,
        }


@contextmanager
def kept_times(folder: RunFolder, write: bool) -> Iterator[Times]:
    """Time a block as ``other``, beside the seconds that the run had; leave ``times.json``."""
    times = Times(folder.read_json(FILE))
    try:
        with times.of("other"):
            yield times
    finally:
        if write:
            folder.write_json(FILE, times.seconds)
