"""What a run takes of its machine: memory and processor of the process and its children, memory and load of the GPU."""

from __future__ import annotations

import logging
import resource
import sys
import time
from pathlib import Path

import psutil
import torch

log = logging.getLogger("algorist.training.hardware")

LOOK_EVERY_S = 10.0
"""Seconds between two looks for new child processes and for the load of the GPU, which cost more than the rest."""


def own_memory(name: str) -> int:
    """Return bytes of this process: ``VmRSS`` (resident now) or ``VmHWM`` (most so far); off Linux always the latter."""
    found = Path("/proc/self/status")
    if found.is_file():
        for line in found.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    # macOS counts bytes, Linux kilobytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Hardware:
    """Reads the use of hardware since the reading before; cheap enough for every logged line.

    Children are found up to ``LOOK_EVERY_S`` late, and short-lived ones are missed. Memory that processes share counts in
    each of them.
    """

    def __init__(self) -> None:
        self._children: list[psutil.Process] = []
        self._seconds: dict[int, float] = {}
        self._gpu_percent: float | None = None
        self._asks_gpu = True
        self._looked = float("-inf")
        self._time, self._own_seconds = time.perf_counter(), time.process_time()
        self._own = psutil.Process()

    def read(self) -> dict[str, float]:
        """Return ``hardware/…``: ram_gb (resident, 1e9 bytes), ram_peak_gb (the most so far, of this process alone),
        cpu_percent (100 is one core), and with CUDA gpu_memory_gb (allocated by tensors now), gpu_memory_peak_gb
        (most so far), gpu_percent (where the driver tells)."""
        if time.perf_counter() - self._looked > LOOK_EVERY_S:
            self._look()
        ram, spent = float(self._own.memory_info().rss), 0.0
        for child in list(self._children):
            try:
                with child.oneshot():
                    times, memory = child.cpu_times(), child.memory_info().rss
            except psutil.Error:  # it has ended, or is not ours to see
                self._children.remove(child)
                continue
            seconds = times.user + times.system
            spent += seconds - self._seconds.get(child.pid, seconds)
            self._seconds[child.pid] = seconds
            ram += memory
        now, own = time.perf_counter(), time.process_time()
        spent += own - self._own_seconds
        percent = 100 * spent / max(now - self._time, 1e-9)
        self._time, self._own_seconds = now, own
        found = {
            "hardware/ram_gb": ram / 1e9,
            "hardware/ram_peak_gb": own_memory("VmHWM") / 1e9,
            "hardware/cpu_percent": percent,
        }
        if torch.cuda.is_initialized():
            found["hardware/gpu_memory_gb"] = torch.cuda.memory_allocated() / 1e9
            found["hardware/gpu_memory_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            if self._gpu_percent is not None:
                found["hardware/gpu_percent"] = self._gpu_percent
        return found

    def _look(self) -> None:
        """Find child processes, and ask for the load of the GPU."""
        try:
            self._children = self._own.children(recursive=True)
        except psutil.Error:
            self._children = []
        self._seconds = {c.pid: self._seconds[c.pid] for c in self._children if c.pid in self._seconds}
        if self._asks_gpu and torch.cuda.is_initialized():
            try:
                self._gpu_percent = float(torch.cuda.utilization())
            except Exception as error:  # no NVML binding, or a device that does not tell (MIG)
                self._asks_gpu = False
                log.warning("the load of the GPU is not recorded (%s); pip install nvidia-ml-py", error)
        self._looked = time.perf_counter()
