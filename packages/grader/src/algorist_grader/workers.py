"""A bounded pool of killable worker processes, and counts of what became of their work.

Usable from any thread, from asyncio (through ``asyncio.to_thread``) and inside data-loader workers; no signal handler is
touched. A worker over its limit is ended and replaced. The limits are those of ``child_process``: time that a worker waits for a
processor does not count, so a busy machine changes no verdict.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections import Counter

from algorist_grader.child_process import Answer, Child
from algorist_grader.errors import GradingError
from algorist_grader.system import after_fork

_counts: Counter[str] = Counter()


class Pool:
    """Workers of one matcher: at most ``most`` at a time, ``keep`` of them stay; more questions wait, and that wait is free."""

    def __init__(
        self, matcher: str, *, timeout_s: float = 1.0, memory_mb: int = 512, keep: int = 2, most: int = 0
    ) -> None:
        self.matcher, self.timeout_s, self.memory_mb, self.keep = matcher, timeout_s, memory_mb, keep
        self.most = most or max(4, 2 * (os.cpu_count() or 2))
        self.replaced = 0
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._room = threading.Condition()

    def ask(self, answer: str, gold: str) -> Answer:
        """Return a worker's verdict within ``timeout_s`` of its work: ``value`` is True, False, or None where it cannot tell.

        ``error`` is ``timeout``, ``memory``, ``raised``, ``crashed`` or ``missing``: a package cannot be imported, ``detail``
        says which one and how to install it.

        Raises:
            GradingError: Workers do not start at all.
        """
        with self._room:
            self._room.wait_for(lambda: self._idle or len(self._busy) < self.most)
            worker = self._idle.pop() if self._idle else self._new()
            self._busy.add(worker)
        error = "interrupted"
        try:
            reply = self._ask(worker, answer, gold)
            error = reply.error
            _counts.update(["asked", *(["crashed" if error == "raised" else error] if error else [])])
            return reply
        finally:
            self._give_back(worker, "" if error == "raised" else error)

    def _ask(self, worker: Child, answer: str, gold: str) -> Answer:
        ready = worker.start()
        if ready.error == "crashed":  # killed while it started, where memory is short
            ready = worker.start()
        if ready.error:
            raise GradingError(
                f"a grading worker for {self.matcher} did not start ({ready.detail or ready.error})"
            )
        if "missing" in ready.value:
            return Answer(None, "missing", ready.value["missing"])
        reply = worker.ask(json.dumps([answer, gold]).encode(), self.timeout_s)
        known = reply.error in ("", "timeout", "memory", "raised")
        return reply if known else Answer(None, "crashed", reply.detail)

    def _new(self) -> Child:
        return Child(
            "algorist_grader.worker:prepare",
            [self.matcher],
            memory_mb=self.memory_mb,
            environment={"OMP_NUM_THREADS": "1"},
        )

    def _give_back(self, worker: Child, error: str) -> None:
        with self._room:
            surplus = len(self._idle) >= self.keep
        if error or surplus:
            worker.close()
            self.replaced += bool(error)
        stays = not surplus and error not in ("interrupted", "missing")
        if stays and error:
            worker.spawn()  # starts while nobody waits for it
        with self._room:
            self._busy.discard(worker)
            if stays:
                self._idle.insert(0, worker) if error else self._idle.append(worker)
            self._room.notify()

    def processes(self) -> list[int]:
        """Return the process ids of the workers' guardians, each of which ends with its worker."""
        with self._room:
            return [w.pid for w in (*self._idle, *self._busy) if w.pid]

    def close(self) -> None:
        """End all workers, busy ones too: nobody waits for their verdict any more."""
        with self._room:
            workers, self._idle = [*self._idle, *self._busy], []
        for worker in workers:
            worker.close()

    def abandon(self) -> None:
        """Forget all workers (in a forked child)."""
        self._room = threading.Condition()
        self._idle, self._busy = [], set()


_pools: dict[tuple[str, float, int, int], Pool] = {}
_pools_lock = threading.Lock()


def pool_for(matcher: str, timeout_s: float, memory_mb: int, version: int = 0) -> Pool:
    """Return the pool of this process for a matcher, its limits, and the version of its file (ns); those of other versions end."""
    key = (matcher, timeout_s, memory_mb, version)
    with _pools_lock:
        for former in [k for k in _pools if k[0] == matcher and k[3] != version]:
            _pools.pop(former).close()
        if key not in _pools:
            keep = max(2, min(4, os.cpu_count() or 2))
            _pools[key] = Pool(matcher, timeout_s=timeout_s, memory_mb=memory_mb, keep=keep)
        return _pools[key]


def stats() -> dict[str, int]:
    """Count the questions to this process's workers, and those that ended in each error."""
    return {name: _counts[name] for name in ("asked", "timeout", "memory", "crashed")}


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
after_fork(_forget_pools)
