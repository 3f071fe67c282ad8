"""One killable process for code that may hang, crash or grow: the grader's slow work and users' rewards.

``Child`` starts ``python -P -m algorist_grader.child_main MODULE:FUNCTION …``. That process is a guardian: it forks the worker, which
calls ``FUNCTION(*arguments)`` once and gets ``(answer, about)`` from it: ``answer(bytes)`` is called for every request, ``about``
is what ``Child.start`` returns. The guardian (``system.guard``) ends the worker and whatever the worker started when its parent
is done with it or dies. Nothing is imported in the parent.

A request is ``number, length, bytes``; an answer has the same number and is JSON. Time is what passes while the worker runs or
sleeps; time that it waits for a processor does not count, so a busy machine changes no result (``BACKSTOP`` bounds that).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorist_grader import system

START_S = 60.0
"""Seconds that a worker may take until it is ready."""
BACKSTOP = 20.0
"""Longest real time of a request on a busy machine, as a multiple of its limit; ten seconds come on top."""
SLICE_S = 0.05
"""Seconds between the parent's looks at the clocks of the worker."""
MAX_ANSWER = 16 * 2**20
"""Largest answer (bytes)."""
MAX_OUTPUT = 64 * 2**10
"""Most bytes of a worker's output that are shown, the rest is dropped."""
GROWTH = 2**30
"""Growth of a worker's memory since its first answer (bytes) after which it is replaced."""
HEAD = struct.Struct("<QQ")
_open: weakref.WeakSet[Child] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Answer:
    """``value``, or an ``error``: ``raised`` (the worker continues), ``timeout``, ``memory``, ``size`` or ``crashed`` (it was ended)."""

    value: Any = None
    error: str = ""
    detail: str = ""

    @property
    def kind(self) -> str:
        """The class of the error: of what was raised, or ``TimeoutError``, ``MemoryError``, ``Crashed``; the detail begins with it."""
        return self.detail.partition(":")[0]

    @property
    def said(self) -> str:
        """The first line of the detail."""
        return self.detail.partition("\n")[0] or self.error


class Child:
    """One worker process; it starts when it is first needed, again after it ended, and ends when its last holder is gone.

    Args:
        target: ``module:function``, called in the worker.
        arguments: Its arguments.
        memory_mb: Memory that the worker may take beyond what it has when it is ready (MiB); None for no limit.
        show: Gets what the worker prints, a piece of text at a time; None drops it.
        environment: Variables to set for it.
        without: Variables that it does not get.
    """

    def __init__(
        self,
        target: str,
        arguments: Sequence[str] = (),
        *,
        memory_mb: int | None = None,
        show: Callable[[str], None] | None = None,
        environment: Mapping[str, str] | None = None,
        without: Collection[str] = (),
    ) -> None:
        self.target, self.arguments, self.memory_mb, self.show = target, list(arguments), memory_mb, show
        self.environment, self.without = dict(environment or {}), without
        self.about: Any = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: system.Pipes | None = None
        self._owner = os.getpid()
        self.forget()
        _open.add(self)

    @property
    def pid(self) -> int | None:
        """The process id of the guardian; None when nothing runs."""
        return self._process.pid if self._process is not None else None

    def spawn(self) -> None:
        """Start the process and do not wait for it."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        paths = [*_folders(__name__, self.target, *self.arguments)]
        paths += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        memory = "" if self.memory_mb is None else str(self.memory_mb)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "algorist_grader.child_main", memory, self.target, *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if self.show else subprocess.DEVNULL,
            env={
                **{name: value for name, value in os.environ.items() if name not in self.without},
                **self.environment,
                "PYTHONPATH": os.pathsep.join(paths),
            },
            bufsize=0,
            start_new_session=True,
        )
        self._pipes = system.Pipes(self._process)

    def start(self, timeout_s: float = START_S) -> Answer:
        """Start the process if there is none and wait until it is ready; ``value`` is what the target says about itself."""
        with self._lock:
            return self._start(timeout_s)

    def ask(self, request: bytes, timeout_s: float) -> Answer:
        """Return the worker's answer; the limit covers the write of the request. A worker over a limit is ended."""
        with self._lock:
            first = self._start(START_S)
            if first.error:
                return first
            self._number += 1
            answer = self._exchange(HEAD.pack(self._number, len(request)) + request, timeout_s)
            if not answer.error and self._has_grown():
                self.close()
            return answer

    def close(self) -> None:
        """End the process and whatever it started; a thread that waits for its answer gets ``crashed``."""
        if not self._lock.acquire(blocking=False):
            if (busy := self._process) is not None:
                system.end(busy)
            return
        try:
            self._close()
        finally:
            self._lock.release()

    def __del__(self) -> None:
        """End the process when nobody can ask it any more."""
        with contextlib.suppress(Exception):
            self.close()

    def _close(self) -> None:
        process, pipes, self._process, self._pipes = self._process, self._pipes, None, None
        self._worker, self._data, self._shown, self._first_memory = 0, b"", 0, 0
        self._is_limited = True
        if process is None or pipes is None:
            return
        if self._owner == os.getpid():
            system.end(process)
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()  # the worker follows by its death signal
                process.wait()
        pipes.close()

    def forget(self) -> None:
        """Begin anew; in a forked process the parent's child is not ours to end, only its pipes are closed here."""
        self._lock = threading.RLock()
        self._close()
        self._owner, self._number = os.getpid(), 0

    def _start(self, timeout_s: float) -> Answer:
        self.spawn()
        if self._worker:
            return Answer(self.about)
        self._number = 0
        answer = self._exchange(b"", timeout_s)
        if answer.error:
            self.close()
            return answer
        self._worker, self.about = answer.value["pid"], answer.value["about"]
        self._is_limited = answer.value["limited"]
        if not self._is_limited:
            self._first_memory = system.memory_of(self._worker)
        return Answer(self.about)

    def _exchange(self, request: bytes, timeout_s: float) -> Answer:
        """Write the request and read the answer of its number."""
        try:
            answer = self._talk(request, timeout_s)
        except BaseException:  # Ctrl-C: the worker is busy with what nobody waits for
            self.close()
            raise
        if answer.error and answer.error != "raised":
            self.close()
        return answer

    def _talk(self, request: bytes, timeout_s: float) -> Answer:
        process, pipes = self._process, self._pipes
        assert process is not None and pipes is not None
        began = last = time.monotonic()
        waited = system.waited(self._worker)
        paused = 0.0
        pipes.send(request)
        while True:
            now = time.monotonic()
            # More than a second: this process itself was stopped or did not get a processor.
            paused += max(0.0, now - last - 1.0)
            last, spent = now, now - began - paused
            late = spent > timeout_s and (
                spent - _starved(self._worker or system.first_child(process.pid), waited) > timeout_s
                or spent > BACKSTOP * timeout_s + 10
            )
            left = max(0.0, timeout_s - spent)
            pieces = pipes.wait(0.0 if late else min(SLICE_S, left) or SLICE_S)
            pieces.sort(key=lambda piece: piece[0] == "answer")  # what was printed came before it
            for name, part in pieces:
                if name == "output":
                    self._pass_on(part)
                elif (answer := self._take(part)) is not None:
                    for _, rest in (piece for piece in pipes.wait(0.0) if piece[0] == "output"):
                        self._pass_on(rest)
                    return answer if answer.error != "crashed" else self._died(process)
            if late and not any(name == "answer" for name, _ in pieces):
                return Answer(error="timeout", detail=f"TimeoutError: it took longer than {timeout_s:g} s")
            if self._is_over_memory():
                return Answer(
                    error="memory", detail=f"MemoryError: it took more than {self.memory_mb} MiB of memory"
                )

    def _take(self, part: bytes) -> Answer | None:
        """Add received bytes; return the answer of this request once it is whole, drop those of others."""
        if not part:
            return Answer(error="crashed", detail="Crashed: its process died")
        self._data += part
        while len(self._data) >= HEAD.size:
            number, length = HEAD.unpack_from(self._data)
            if length > MAX_ANSWER:
                return Answer(error="size", detail=f"Crashed: its answer has more than {MAX_ANSWER} bytes")
            if len(self._data) < HEAD.size + length:
                return None
            body, self._data = self._data[HEAD.size : HEAD.size + length], self._data[HEAD.size + length :]
            if number == self._number:
                try:
                    reply = json.loads(body)
                    return Answer(
                        reply.get("value"), str(reply.get("error", "")), str(reply.get("detail", ""))
                    )
                except (ValueError, AttributeError, RecursionError):
                    return Answer(error="crashed", detail="Crashed: its process died")
        return None

    def _pass_on(self, part: bytes) -> None:
        """Show the worker's output, up to ``MAX_OUTPUT`` per process."""
        if part and self.show and self._shown < MAX_OUTPUT:
            self.show(part[: MAX_OUTPUT - self._shown].decode("utf-8", errors="replace"))
            if self._shown + len(part) >= MAX_OUTPUT:
                self.show(f"\n[what comes after {MAX_OUTPUT} bytes is not shown]\n")
        self._shown += len(part)

    @staticmethod
    def _died(process: subprocess.Popen[bytes]) -> Answer:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
        code = process.returncode
        code = 128 - code if code and code < 0 else code  # nothing guarded it
        name = signal.Signals(code - 128).name if code and code - 128 in set(signal.Signals) else None
        return Answer(
            error="crashed",
            detail=f"Crashed: its process died ({f'by {name}' if name else f'exit code {code}'})",
        )

    def _has_grown(self) -> bool:
        held = system.memory_of(self._worker)
        self._first_memory = self._first_memory or held
        return held - self._first_memory > GROWTH

    def _is_over_memory(self) -> bool:
        """Return whether a worker that the system does not limit has taken more than it may."""
        if self._is_limited or not self.memory_mb:
            return False
        return system.memory_of(self._worker) - self._first_memory > self.memory_mb * 2**20


def _folders(*targets: str) -> Iterator[str]:
    """Yield the folders that hold the packages of these ``module:function`` which are loaded here: a child imports the same ones."""
    for name in dict.fromkeys(target.partition(":")[0].partition(".")[0] for target in targets):
        folders = getattr(sys.modules.get(name), "__path__", ())
        yield from (str(Path(folder).resolve().parent) for folder in folders)


def _starved(pid: int, before: dict[str, float]) -> float:
    """Return the longest that a thread of a process has waited for a processor since ``before`` (s)."""
    return max(
        (seconds - before.get(thread, 0.0) for thread, seconds in system.waited(pid).items()), default=0.0
    )


def _forget_children() -> None:
    for child in list(_open):
        child.forget()


def close_children() -> None:
    """End all children of this process."""
    for child in list(_open):
        if child._owner == os.getpid():
            child.close()


atexit.register(close_children)
system.after_fork(_forget_children)
