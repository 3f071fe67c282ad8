"""Facilities that not every system has, each with a plain fallback: file locks, the processor's make, peaks of memory.

With ``algorist_grader.system`` (forks, death signals, pipes, limits) the only module that imports ``fcntl``, ``resource`` or ``ctypes``,
forks, or reads /proc (``tests/unit/test_layers.py``; what needs Linux says so itself). ``lacking`` says what is missing here, and
``algorist doctor`` shows it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any

import psutil

from algorist_grader.system import FORKS, HANGUP, optional, resource, status, waited

CPUINFO = Path("/proc/cpuinfo")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
fcntl: Any = optional("fcntl")


def lacking() -> list[str]:
    """List the facilities that this system lacks, with the effect, a sentence each; nothing on Linux."""
    readable = bool(waited(os.getpid()))
    facts = (
        (fcntl is None, "file locks: a run folder is held by a process id written into it"),
        (
            not FORKS,
            "fork: what an own reward starts ends with it, but not what that starts once it is an orphan; no tool that forks",
        ),
        (HANGUP is None, "SIGHUP: closing the terminal ends a run without saving the step"),
        (
            not readable,
            "/proc: on a busy machine waiting for a processor counts into the time limits of graders and rewards",
        ),
        (
            resource is None or not readable,
            "limits of memory: graders and own rewards are looked at while they work and ended when they grow",
        ),
    )
    return [text for missing, text in facts if missing]


# ---- locks


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[str | None]:
    """Hold a file until the end of the block; the system lets go when the process ends, however it ends.

    Yields:
        None, or who holds it (a process id, ``?`` where that is not written yet).

    Raises:
        OSError: It cannot be written.
    """
    with path.open("a+", encoding="utf-8") as file:
        for _ in range(20):  # ``is_locked`` holds it briefly
            if _take(file, shared=False):
                break
            time.sleep(0.05)
        else:
            file.seek(0)
            yield (file.read().split() or ["?"])[0]
            return
        try:
            yield None
        finally:
            if fcntl is None:
                file.truncate(0)


def is_locked(path: Path) -> bool:
    """Return whether a process holds a file."""
    try:
        with path.open("r", encoding="utf-8") as file:
            return not _take(file, shared=True)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _take(file: IO[str], *, shared: bool) -> bool:
    """Lock an open file; without locks of the system it is taken where the process written into it is gone."""
    mark = str(os.getpid())
    if fcntl is not None:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    else:
        mark += f" {psutil.Process().create_time()}"
        file.seek(0)
        if _lives(file.read()):
            return False
    if not shared:
        _rewrite(file, mark)
        if fcntl is None:
            time.sleep(0.05)  # of two that came at once, the one that wrote last has it
            file.seek(0)
            return file.read() == mark
    return True


def _rewrite(file: IO[str], text: str) -> None:
    file.truncate(0)
    file.write(text)
    file.flush()


def _lives(mark: str) -> bool:
    pid, _, created = mark.partition(" ")
    try:
        return bool(mark) and psutil.Process(int(pid)).create_time() == float(created)
    except (psutil.Error, ValueError):
        return False


def sync_folder(folder: Path) -> None:
    """Make renames and removals in ``folder`` last through a power cut; Windows opens no folders."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- memory and processor


def own_memory(*, peak: bool = False) -> int:
    """Return the resident memory of this process in bytes, now or the most so far."""
    with contextlib.suppress(OSError, StopIteration):
        return status("VmHWM" if peak else "VmRSS")
    if peak and resource is not None:  # macOS counts bytes, others kilobytes
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(most * (1 if sys.platform == "darwin" else 1024))
    memory = psutil.Process().memory_info()
    return int(getattr(memory, "peak_wset", memory.rss) if peak else memory.rss)


def reset_peak() -> None:
    """Let ``own_memory(peak=True)`` begin anew, on Linux."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def available_memory() -> int:
    """Return the bytes that this process can still take: what the machine has left, within control groups and limits.

    Processes that a launcher started together share what is left.
    """
    together = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    left = [each // together for each in (int(psutil.virtual_memory().available), *_left_in_groups())]
    for limit, used in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        with contextlib.suppress(AttributeError, OSError, StopIteration):
            soft, _ = resource.getrlimit(getattr(resource, limit))
            left += [soft - status(used)] * (soft != resource.RLIM_INFINITY)
    return max(0, min(left))


def _left_in_groups() -> Iterator[int]:
    """Yield the bytes left by each control group (version 1 or 2) that this process is in; cached files give way."""
    for line in _lines(Path("/proc/self/cgroup")):
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        names = ("limit_in_bytes", "usage_in_bytes", "total_") if kinds else ("max", "current", "")
        top = CONTROL_GROUPS / "memory" if kinds else CONTROL_GROUPS
        # A container may see the path outside it, and its own group at the top.
        folder = top / path.lstrip("/")
        for group in (g for g in (folder, *folder.parents) if g.is_relative_to(top)):
            limit, used = (_lines(group / f"memory.{name}") for name in names[:2])
            if limit and used and limit[0].isdigit():
                cached = (entry.split() for entry in _lines(group / "memory.stat"))
                free = sum(int(n) for k, n in cached if k == f"{names[2]}inactive_file")
                yield int(limit[0]) - int(used[0]) + free


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


@contextlib.contextmanager
def bounded_memory(more: int) -> Iterator[None]:
    """Limit this process to ``more`` bytes beyond what it has (an error) until the block ends; on Linux."""
    try:
        before = resource.getrlimit(resource.RLIMIT_DATA)
        limit = status("VmData") + more
        resource.setrlimit(
            resource.RLIMIT_DATA,
            (min([limit, *(n for n in before if n != resource.RLIM_INFINITY)]), before[1]),
        )
    except (AttributeError, OSError, StopIteration, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def processor_seconds() -> float:
    """Return the processor time of this process and of its children that have ended (s); Windows does not count children."""
    return sum(os.times()[:4])


def cpuinfo() -> str:
    """Return Linux's description of the processor, one ``name : value`` a line; empty elsewhere."""
    return "\n".join(_lines(CPUINFO))


def has_bfloat16() -> bool:
    """Return whether this processor multiplies in bfloat16 (AVX512-BF16, AMX, Arm's BF16), as far as Linux says; others imitate it, slowly."""
    return re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", cpuinfo()) is not None


@cache
def processor_name() -> str:
    """Return the make of the processor."""
    for line in cpuinfo().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(
                command, capture_output=True, text=True, timeout=5, check=True
            ).stdout.strip()
    return platform.processor() or platform.machine()
