"""What the seconds of a run went to: loading, evaluation, saving, the steps of its stages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from algorist.store.run_folder import RunFolder

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
