"""A pool of killable worker processes with a wall clock and a memory limit.

Plain subprocesses with pipes: no fork of the caller, no signal handler touched, usable from any thread, from asyncio
(through ``asyncio.to_thread``) and inside data-loader workers. A worker over its limit is killed and replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from algorist.errors import GradingError

_START_S = 30.0
_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker said: ``told`` (None: it cannot tell), or ``error`` (``timeout``, ``memory``, ``crashed``, ``missing``).

    ``missing`` means that a package cannot be imported; ``detail`` says which one and how to install it.
    """

    told: bool | None
    error: str = ""
    detail: str = ""


class _Worker:
    def __init__(self, matcher: str, timeout_s: float, memory_mb: int) -> None:
        paths = [_ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "algorist.grading.worker", matcher, str(timeout_s), str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            bufsize=0,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.sink, self.source = self.process.stdin, self.process.stdout
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.source, selectors.EVENT_READ)
        self.ready = False

    def ask(self, answer: str, gold: str, timeout_s: float) -> Told:
        if not self.ready:
            first = self._line(_START_S)
            if first is None:
                raise GradingError(f"a grading worker did not start (exit code {self.process.poll()})")
            hello = json.loads(first)
            if "missing" in hello:
                return Told(None, "missing", hello["missing"])
            self.ready = True
        try:
            self.sink.write(json.dumps({"answer": answer, "gold": gold}).encode() + b"\n")
        except (BrokenPipeError, OSError):
            return Told(None, "crashed")
        line = self._line(timeout_s)
        if line is None:
            return Told(None, "crashed" if self._ended() else "timeout")
        found = json.loads(line)
        return Told(found.get("told"), found.get("error", ""))

    def _line(self, timeout_s: float) -> bytes | None:
        deadline = time.monotonic() + timeout_s
        parts: list[bytes] = []
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not self.selector.select(left):
                return None
            part = os.read(self.source.fileno(), 65536)
            if not part:
                return None
            parts.append(part)
            if part.endswith(b"\n"):
                return b"".join(parts)

    def _ended(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(0.02) is not None
        return False

    def close(self, *, kill: bool) -> None:
        if kill:
            self.process.kill()
        self.selector.close()
        for pipe in (self.sink, self.source):
            with contextlib.suppress(OSError):
                pipe.close()
        if kill:
            self.process.wait()

    def abandon(self) -> None:
        """Forget the worker in a forked child: its pipes belong to the parent."""
        for pipe in (self.sink, self.source):
            with contextlib.suppress(OSError):
                pipe.close()


class Pool:
    """Idle workers of one matcher; grows while all are busy, keeps ``keep`` of them."""

    def __init__(self, matcher: str, *, timeout_s: float = 1.0, memory_mb: int = 512, keep: int = 2) -> None:
        self.matcher, self.timeout_s, self.memory_mb, self.keep = matcher, timeout_s, memory_mb, keep
        self.replaced = 0
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._lock = threading.Lock()

    def ask(self, answer: str, gold: str) -> Told:
        """Return a worker's verdict within ``timeout_s`` of its start of work.

        Raises:
            GradingError: Workers do not start at all.
        """
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = self._new()
        with self._lock:
            self._busy.add(worker)
        told = Told(None, "crashed")
        try:
            told = worker.ask(answer, gold, self.timeout_s)
        except BaseException:
            told = Told(None, "interrupted")
            raise
        finally:
            self._give_back(worker, told)
        return told

    def _new(self) -> _Worker:
        return _Worker(self.matcher, self.timeout_s, self.memory_mb)

    def _give_back(self, worker: _Worker, told: Told) -> None:
        with self._lock:
            self._busy.discard(worker)
            surplus = len(self._idle) >= self.keep
        if told.error:
            worker.close(kill=True)
            self.replaced += 1
            if surplus or told.error in ("interrupted", "missing"):
                return
            worker = self._new()  # starts while nobody waits for it
        elif surplus:
            worker.close(kill=True)
            return
        with self._lock:
            self._idle.insert(0, worker) if told.error else self._idle.append(worker)

    def processes(self) -> list[int]:
        """Return the process ids of the workers."""
        with self._lock:
            return [w.process.pid for w in (*self._idle, *self._busy)]

    def warm(self) -> None:
        """Start a worker now, so that the first slow answer does not wait for it."""
        with self._lock:
            if not self._idle:
                self._idle.append(self._new())

    def close(self) -> None:
        """End all workers, busy ones too: nobody waits for their verdict any more."""
        with self._lock:
            workers, self._idle = [*self._idle, *self._busy], []
        for worker in workers:
            worker.close(kill=True)

    def abandon(self) -> None:
        """Forget all workers (in a forked child)."""
        self._lock = threading.Lock()
        for worker in (*self._idle, *self._busy):
            worker.abandon()
        self._idle, self._busy = [], set()


_pools: dict[tuple[str, float, int], Pool] = {}
_pools_lock = threading.Lock()


def pool_for(matcher: str, timeout_s: float, memory_mb: int) -> Pool:
    """Return the pool of this process for a matcher and its limits."""
    key = (matcher, timeout_s, memory_mb)
    with _pools_lock:
        if key not in _pools:
            _pools[key] = Pool(
                matcher, timeout_s=timeout_s, memory_mb=memory_mb, keep=max(2, min(4, os.cpu_count() or 2))
            )
        return _pools[key]


def close_pools() -> None:
    """End all workers of this process."""
    with _pools_lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()


def _forget_pools() -> None:
    global _pools_lock
    _pools_lock = threading.Lock()
    for pool in _pools.values():
        pool.abandon()
    _pools.clear()


atexit.register(close_pools)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)
