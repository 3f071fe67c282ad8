"""Memory of a model on the CPU: what is freed stays with the process for the next block.

glibc maps a large block from the system and gives it back when it is freed. Activations, gradients and weights laid out for decoding
are such blocks, made and freed at every step, and the system fills each of their pages with zeros at first touch: a page fault
each. Kept, a block is touched once. The numbers computed are the same; ``benchmarks/host_memory.py`` measures the time.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache

from algorist_grader.system import c_function

log = logging.getLogger("algorist.models.host_memory")

LARGEST_KEPT = 1 << 30
"""Bytes of the largest block that stays; a hole left by a larger one would be much memory to hold for nothing."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8  # of glibc's malloc.h
_NEVER = -1


@cache
def keep_freed_memory() -> bool:
    """Have this process keep what it frees, once for all; return whether it does.

    Left alone: other systems and C libraries, a glibc that refuses so high a threshold (2.36 takes it), and an allocator that
    the user has chosen or set (``LD_PRELOAD``, ``GLIBC_TUNABLES``, ``MALLOC_…``).
    """
    own = [
        name for name in os.environ if name in ("LD_PRELOAD", "GLIBC_TUNABLES") or name.startswith("MALLOC_")
    ]
    if own or sys.platform != "linux":
        log.debug("the allocator is left as it is (%s)", ", ".join(own) or sys.platform)
        return False
    mallopt = c_function("mallopt")
    if mallopt is None:  # another C library
        return False
    # One arena: what a thread's own arena holds beyond 64 MiB is mapped whatever the threshold.
    return bool(
        mallopt(_MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_ARENA_MAX, 1)
    )
