"""One killable process for code that may hang, crash or grow: the grader's slow work and users' rewards.

``Child`` starts ``python -P -m algorist.child_process MODULE:FUNCTION …``. That process is a guardian: it forks the worker, which
calls ``FUNCTION(*arguments)`` once and gets ``(answer, about)`` from it: ``answer(bytes)`` is called for every request, ``about``
is what ``Child.start`` returns. The guardian ends the worker and whatever the worker started, in other sessions too, as soon
as its parent closes the pipe, asks for it, or dies in any way. Nothing is imported in the parent.

A request is ``number, length, bytes``; an answer has the same number and is JSON. Time is what passes while the worker runs or
sleeps; time that it waits for a processor does not count, so a busy machine changes no result (``BACKSTOP`` bounds that).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

START_S = 60.0
"""Seconds that a worker may take until it is ready."""
BACKSTOP = 20.0
"""On a busy machine a request may take so many times its limit, and ten seconds more, in real time."""
SLICE_S = 0.05
"""How often the parent looks at the clocks of the worker (s)."""
MAX_ANSWER = 16 * 2**20
"""Largest answer (bytes)."""
MAX_OUTPUT = 64 * 2**10
"""So much of what a worker prints is passed on (bytes), the rest is dropped."""
GROWTH = 2**30
"""A worker whose memory has grown by so much since its first answer (bytes) is replaced."""
_HEAD = struct.Struct("<QQ")
_ROOT = str(Path(__file__).resolve().parents[1])
_DEATH_SIGNAL, _SUBREAPER = 1, 36  # prctl's numbers on Linux
_open: weakref.WeakSet[Child] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Answer:
    """``value``, or an ``error``: ``raised`` (the worker continues), ``timeout``, ``memory``, ``size`` or ``crashed`` (it was ended)."""

    value: Any = None
    error: str = ""
    detail: str = ""


class Child:
    """One worker process; it starts when it is first needed and again after it ended.

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
        paths = [_ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        memory = "" if self.memory_mb is None else str(self.memory_mb)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "algorist.child_process", memory, self.target, *self.arguments],
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
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)

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
            answer = self._exchange(_HEAD.pack(self._number, len(request)) + request, timeout_s)
            if not answer.error and self._has_grown():
                self.close()
            return answer

    def close(self) -> None:
        """End the process and whatever it started; a thread that waits for its answer gets ``crashed``."""
        if not self._lock.acquire(blocking=False):
            if (busy := self._process) is not None:
                busy.terminate()
            return
        try:
            self._close()
        finally:
            self._lock.release()

    def _close(self) -> None:
        process, self._process, self._worker = self._process, None, 0
        self._data, self._shown, self._first_memory = b"", 0, 0
        if process is None:
            return
        if self._owner == os.getpid():
            process.terminate()  # the guardian ends the others first
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()  # the worker follows by its death signal
                process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

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
        return Answer(self.about)

    def _exchange(self, request: bytes, timeout_s: float) -> Answer:
        """Write the request and read the answer of its number."""
        try:
            answer = self._talk(memoryview(request), timeout_s)
        except BaseException:  # Ctrl-C: the worker is busy with what nobody waits for
            self.close()
            raise
        if answer.error and answer.error != "raised":
            self.close()
        return answer

    def _talk(self, unsent: memoryview, timeout_s: float) -> Answer:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        began = last = time.monotonic()
        waited = _waited(self._worker)
        paused = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, "answer")
            if process.stderr is not None:
                selector.register(process.stderr, selectors.EVENT_READ, "output")
            if unsent:
                selector.register(process.stdin, selectors.EVENT_WRITE, "request")
            while True:
                now = time.monotonic()
                # More than a second: this process itself was stopped or did not get a processor.
                paused += max(0.0, now - last - 1.0)
                last, spent = now, now - began - paused
                late = spent > timeout_s and (
                    spent - _starved(self._worker or _child_of(process.pid), waited) > timeout_s
                    or spent > BACKSTOP * timeout_s + 10
                )
                left = max(0.0, timeout_s - spent)
                ready = selector.select(0.0 if late else min(SLICE_S, left) or SLICE_S)
                for key, _ in ready:
                    if key.data == "request":
                        unsent = self._write(process.stdin.fileno(), unsent)
                        if not unsent:
                            selector.unregister(process.stdin)
                    elif key.data == "output":
                        if not self._pass_on(key.fd):
                            selector.unregister(process.stderr)  # type: ignore[arg-type]
                    elif (answer := self._read(key.fd)) is not None:
                        if process.stderr is not None:
                            self._pass_on(process.stderr.fileno())
                        return answer if answer.error != "crashed" else self._died(process)
                if late and not any(key.data == "answer" for key, _ in ready):
                    return Answer(error="timeout")

    @staticmethod
    def _write(handle: int, unsent: memoryview) -> memoryview:
        try:
            return unsent[os.write(handle, unsent[: 1 << 16]) :]
        except BlockingIOError:
            return unsent
        except OSError:
            return unsent[len(unsent) :]  # it died; the answer's pipe tells

    def _read(self, handle: int) -> Answer | None:
        """Take what has come; return the answer of this request once it is whole, drop those of others."""
        try:
            part = os.read(handle, 1 << 16)
        except BlockingIOError:
            return None
        if not part:
            return Answer(error="crashed")
        self._data += part
        while len(self._data) >= _HEAD.size:
            number, length = _HEAD.unpack_from(self._data)
            if length > MAX_ANSWER:
                return Answer(error="size", detail=f"its answer has more than {MAX_ANSWER} bytes")
            if len(self._data) < _HEAD.size + length:
                return None
            body, self._data = self._data[_HEAD.size : _HEAD.size + length], self._data[_HEAD.size + length :]
            if number == self._number:
                try:
                    reply = json.loads(body)
                    return Answer(
                        reply.get("value"), str(reply.get("error", "")), str(reply.get("detail", ""))
                    )
                except (ValueError, AttributeError, RecursionError):
                    return Answer(error="crashed")
        return None

    def _pass_on(self, handle: int) -> bool:
        """Show what the worker printed, up to ``MAX_OUTPUT`` per process; return whether more can come."""
        try:
            part = os.read(handle, 1 << 16)
        except BlockingIOError:
            return True
        if part and self.show and self._shown < MAX_OUTPUT:
            self.show(part[: MAX_OUTPUT - self._shown].decode("utf-8", errors="replace"))
            if self._shown + len(part) >= MAX_OUTPUT:
                self.show(f"\n[what comes after {MAX_OUTPUT} bytes is not shown]\n")
        self._shown += len(part)
        return bool(part)

    @staticmethod
    def _died(process: subprocess.Popen[bytes]) -> Answer:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
        code = process.returncode
        name = signal.Signals(code - 128).name if code and code - 128 in set(signal.Signals) else None
        return Answer(
            error="crashed", detail=f"its process died ({f'by {name}' if name else f'exit code {code}'})"
        )

    def _has_grown(self) -> bool:
        held = _memory(self._worker)
        self._first_memory = self._first_memory or held
        return held - self._first_memory > GROWTH


def _memory(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def _waited(pid: int) -> dict[str, float]:
    """Return how long each thread of a process has waited for a processor (s); nothing where the system does not tell."""
    reaped = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for thread in os.listdir(f"/proc/{pid}/task") if pid else ():  # noqa: PTH208
            reaped[thread] = int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    return reaped


def _starved(pid: int, before: dict[str, float]) -> float:
    return max((seconds - before.get(thread, 0.0) for thread, seconds in _waited(pid).items()), default=0.0)


def _child_of(guardian: int) -> int:
    try:
        return int(Path(f"/proc/{guardian}/task/{guardian}/children").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _forget_children() -> None:
    for child in list(_open):
        child.forget()


def close_children() -> None:
    """End all children of this process."""
    for child in list(_open):
        if child._owner == os.getpid():
            child.close()


atexit.register(close_children)
os.register_at_fork(after_in_child=_forget_children)


# From here on: in the other process.


def _main(memory_mb: str, target: str, *arguments: str) -> None:
    """Fork: the first process guards, the second one works."""
    guardian = os.getpid()
    _prctl(_SUBREAPER, 1)
    worker = os.fork()
    if worker:
        _guard(worker)
    os.setsid()  # what kills its own group does not reach the guardian
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != guardian:
        os._exit(1)
    _work(memory_mb, target, arguments)


def _guard(worker: int) -> None:
    """Wait until the worker ends, the parent ends, closes the pipe or sends SIGTERM; then end all that is left."""
    parent = os.getppid()
    source = os.dup(0)
    for handle in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), handle)
    wake, bell = os.pipe()
    os.set_blocking(bell, False)
    signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    import select

    poll = select.poll()
    poll.register(source, 0)  # hang-up only: the requests are the worker's
    poll.register(wake, select.POLLIN)
    code = None
    while code is None and os.getppid() == parent:
        events = dict(poll.poll(500))
        if source in events:
            break
        if wake in events and signal.SIGTERM in os.read(wake, 512):
            break
        code = _reap(worker)
    _end_all(worker)
    os._exit(0 if code is None else code)


def _reap(worker: int) -> int | None:
    """Collect ended children; return the worker's exit code, 128 + N after signal N, or None while it runs."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == worker:
                return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
            if not pid:
                return None
    return 1


def _end_all(worker: int) -> None:
    """Kill the worker's group and every descendant; those whose parent dies become children of the guardian, on Linux."""
    with contextlib.suppress(OSError):
        os.killpg(worker, signal.SIGKILL)
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        for pid in _children():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        except ChildProcessError:
            return


def _children() -> list[int]:
    me, pids = os.getpid(), []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[1]) == me:
                pids.append(int(stat.parent.name))
    return pids


def _work(memory_mb: str, target: str, arguments: Sequence[str]) -> None:
    """Prepare, say so, and answer until the input ends."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the run's business, which ends this process when it is done
    me = os.getpid()

    def send(number: int, content: dict[str, Any]) -> None:
        if os.getpid() != me:
            os._exit(1)  # a fork that came back from the user's code
        body = json.dumps(content).encode()
        if len(body) > MAX_ANSWER:
            body = json.dumps({"error": "size", "detail": f"its answer has {len(body)} bytes"}).encode()
        sink.write(_HEAD.pack(number, len(body)) + body)
        sink.flush()

    module, _, name = target.partition(":")
    try:
        answer, about = getattr(import_module(module), name)(*arguments)
    except BaseException as error:
        send(0, {"error": "raised", "detail": _said(error)})
        return
    with contextlib.suppress(ImportError, OSError, ValueError):
        if memory_mb:
            _limit_memory(int(memory_mb))
    send(0, {"value": {"pid": me, "about": about}})
    while len(head := source.read(_HEAD.size)) == _HEAD.size:
        number, length = _HEAD.unpack(head)
        reply: dict[str, Any]
        try:
            reply = {"value": answer(source.read(length))}
        except MemoryError:
            reply = {"error": "memory"}
        except BaseException as error:  # SystemExit and math-verify's timeout are no Exceptions
            reply = {"error": "raised", "detail": _said(error)}
        send(number, reply)


def _said(error: BaseException) -> str:
    """Return the error and its traceback, at most 8,000 characters of each."""
    import traceback

    try:
        message = repr(error)
    except Exception:
        message = type(error).__name__
    return f"{message[:8000]}\n{''.join(traceback.format_exception(error, limit=-20))[-8000:]}"


def _limit_memory(megabytes: int) -> None:
    """Limit the writable memory (RLIMIT_DATA); what is there already comes on top."""
    held = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData")
    )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = held + megabytes * 2**20
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    from algorist.child_process import _main as main  # one copy of this module, under its own name

    main(*sys.argv[1:])
