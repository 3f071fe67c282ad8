"""The memory of the device that a model is on: what it has in all, what is left, what this process takes and took at its peak."""

from __future__ import annotations

import contextlib
import gc

import torch

from algorist import system
from algorist.models.precision import on_gpu, unused_gpu_bytes
from algorist_grader.system import c_function

MARGIN = 0.95
"""Share of a machine's free memory that a training process may take: the rest is for other processes that grow."""
LARGE, LITTLE = 2 << 30, 0.5
"""Bytes of a process, and free memory as a share of them, from which and below which its heap is trimmed before an update."""


def memory_now() -> int:
    """Return what is taken now: of the GPU where there is one, else the resident memory of this process.

    What was freed but is still with the allocator is given back first: the next stage would use it again.
    """
    gc.collect()
    if torch.cuda.is_available():
        return int(torch.cuda.memory_allocated())
    _trim()
    return system.own_memory()


def trim_heap(device: torch.device) -> None:
    """Return freed blocks to the system where a large process on the CPU leaves it little: blocks of ever other sizes leave holes that add up.

    The pages are faulted in again by the next step, which takes time, so they stay with the process where memory is plenty.
    """
    own = 0 if on_gpu(device) else system.own_memory()
    if own > LARGE and system.available_memory() < LITTLE * own:
        _trim()


def _trim() -> None:
    """Give back what was freed and is still with the C library's allocator."""
    if (trim := c_function("malloc_trim")) is not None:
        trim(0)


def memory_left(device: torch.device) -> int:
    """Return the bytes that a process can still take on a device: of the card, or of this machine within its limits."""
    if on_gpu(device):
        return unused_gpu_bytes(device)
    _trim()
    return system.available_memory()


def memory_limit() -> int:
    """Return what this process may take in all: of the card, or what it has of this machine and what is left there."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return memory_now() + system.available_memory()


def bounded_memory(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Let memory that the machine does not have be refused (an error, and smaller parts) rather than end this process; Linux."""
    on_cpu = device.type == "cpu"
    return system.bounded_memory(int(MARGIN * memory_left(device))) if on_cpu else contextlib.nullcontext()


def reset_peak() -> None:
    """Forget the highest value so far, and what was freed before."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    _trim()
    system.reset_peak()


def peak() -> int:
    """Return the highest value since ``reset_peak``, in bytes."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return system.own_memory(peak=True)
