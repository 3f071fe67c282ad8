"""Facilities that not every system has, each with a plain fallback: forks, death signals, pipes to wait on, /proc, limits of memory.

Nothing else in the grader imports ``resource`` or ``ctypes``, forks, or reads /proc (``tests/unit/test_layers.py``).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

HANGUP: int | None = getattr(signal, "SIGHUP", None)
"""The signal of a terminal that went away; None on Windows."""
STOPPING = tuple(n for n in (signal.SIGINT, signal.SIGTERM, HANGUP) if n is not None)
"""Signals that ask a process to end."""
_DEATH_SIGNAL, _SUBREAPER = 1, 36  # prctl's numbers on Linux
_WAITS_ON_PIPES = os.name != "nt" and hasattr(os, "set_blocking")
FORKS = hasattr(os, "fork")
"""Whether this system forks; Windows does not."""


def optional(name: str) -> ModuleType | None:
    """Import a module of the standard library; None where this system lacks it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


resource: Any = optional("resource")


# ---- memory and processor


def status(name: str) -> int:
    """Read a figure of /proc/self/status (bytes)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def memory_of(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 where the system does not tell."""
    try:
        return int(psutil.Process(pid).memory_info().rss) if pid else 0
    except psutil.Error:
        return 0


def limit_memory(megabytes: int) -> bool:
    """Limit the writable memory of this process (RLIMIT_DATA) beyond what it has; return whether the system does that."""
    try:
        limit = status("VmData") + megabytes * 2**20
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    except (AttributeError, OSError, StopIteration, ValueError):
        return False
    return True


def c_function(name: str) -> Any | None:
    """Return a function of Linux's C library; None elsewhere, or where there is none of that name."""
    try:
        library: Any = importlib.import_module("ctypes").CDLL(None) if sys.platform == "linux" else None
        return getattr(library, name)
    except (ImportError, OSError, AttributeError):
        return None


def waited(pid: int) -> dict[str, float]:
    """Return the seconds that each thread of a process has waited for a processor; nothing where the system does not tell."""
    seconds = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for task in Path(f"/proc/{pid}/task").iterdir() if pid else ():
            seconds[task.name] = int((task / "schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    return seconds


# ---- a child process: its pipes, who guards it, its end


class Pipes:
    """The pipes of a child process: what is sent to it, and what has come from it by a time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._unsent = process, memoryview(b"")
        self._readable = {"answer": process.stdout.fileno()}
        if process.stderr is not None:
            self._readable["output"] = process.stderr.fileno()
        if _WAITS_ON_PIPES:
            for handle in (process.stdin.fileno(), *self._readable.values()):
                os.set_blocking(handle, False)
            return
        self._come: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._leaving: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for name, handle in self._readable.items():
            threading.Thread(target=self._read_on, args=(name, handle), daemon=True).start()
        threading.Thread(target=self._write_on, daemon=True).start()

    def send(self, request: bytes) -> None:
        """Send bytes; what does not fit into the pipe leaves during ``wait``. What was not sent of an earlier request is forgotten."""
        self._unsent = memoryview(request)
        if not _WAITS_ON_PIPES and request:
            self._leaving.put(request)

    def wait(self, timeout_s: float) -> list[tuple[str, bytes]]:
        """Return the data received, as (``answer`` or ``output``, bytes; none at its end), after at most ``timeout_s``."""
        return self._select(timeout_s) if _WAITS_ON_PIPES else self._collect(timeout_s)

    def close(self) -> None:
        """Close them, as far as nothing reads them any more."""
        if not _WAITS_ON_PIPES:
            self._leaving.put(None)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                if pipe is not None and (_WAITS_ON_PIPES or pipe is self._process.stdin):
                    pipe.close()

    def _select(self, timeout_s: float) -> list[tuple[str, bytes]]:
        assert self._process.stdin is not None
        come = []
        with selectors.DefaultSelector() as selector:
            for name, handle in self._readable.items():
                selector.register(handle, selectors.EVENT_READ, name)
            if self._unsent:
                selector.register(self._process.stdin, selectors.EVENT_WRITE, "request")
            for key, _ in selector.select(timeout_s):
                if key.data == "request":
                    self._write(key.fd)
                    continue
                with contextlib.suppress(BlockingIOError):
                    part = os.read(key.fd, 1 << 16)
                    come.append((key.data, part))
                    if not part:
                        del self._readable[key.data]
        return come

    def _write(self, handle: int) -> None:
        try:
            self._unsent = self._unsent[os.write(handle, self._unsent[: 1 << 16]) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = memoryview(b"")  # it died; the answer's pipe tells

    def _collect(self, timeout_s: float) -> list[tuple[str, bytes]]:
        come = []
        with contextlib.suppress(queue.Empty):
            come.append(self._come.get(timeout=max(timeout_s, 0.001)))
            while True:
                come.append(self._come.get_nowait())
        return come

    def _read_on(self, name: str, handle: int) -> None:
        part = b"-"
        while part:
            try:
                part = os.read(handle, 1 << 16)
            except OSError:
                part = b""
            self._come.put((name, part))

    def _write_on(self) -> None:
        assert self._process.stdin is not None
        while (request := self._leaving.get()) is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(request)


def after_fork(function: Callable[[], None]) -> None:
    """Have ``function`` called in each process that this one forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def ignore_stopping() -> None:
    """Leave Ctrl-C and a terminal that goes away to whoever started this process."""
    for number in STOPPING:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that called ``guard``, and what it started."""
    if FORKS:
        process.terminate()  # the guardian ends the others first
        return
    _kill_descendants(process.pid)
    process.kill()


def first_child(pid: int) -> int:
    """Return the worker of a guardian, or 0; a process that nothing guards is its own."""
    if not FORKS:
        return pid
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def guard() -> None:
    """Fork: the first process guards and never returns; the second one returns to its work.

    The guardian ends the worker and whatever the worker started, in other sessions too, as soon as its parent closes the pipe, asks for
    it, or dies. Without fork the one process works, and ends itself when its parent has died.
    """
    if not FORKS:
        parent = psutil.Process().parent()
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        return
    guardian = os.getpid()
    _prctl(_SUBREAPER, 1)
    worker = os.fork()
    if worker:
        _guard(worker)
    os.setsid()  # what kills its own group does not reach the guardian
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != guardian:
        os._exit(1)


def _end_with(parent: psutil.Process | None) -> None:
    while parent is not None and parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
        time.sleep(1.0)
    _kill_descendants(os.getpid())
    os._exit(1)


def _kill_descendants(pid: int) -> None:
    with contextlib.suppress(psutil.Error):
        for descendant in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                descendant.kill()


def _guard(worker: int) -> None:
    """Wait until the worker ends, the parent ends, closes the pipe or sends SIGTERM; then end all that is left."""
    parent = os.getppid()
    source = os.dup(0)
    for handle in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), handle)
    wake, bell = os.pipe()
    os.set_blocking(bell, False)
    signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
    for number in (*STOPPING, signal.SIGCHLD):
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
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                child.kill()
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        except ChildProcessError:
            return


def _prctl(option: int, value: int) -> None:
    function = c_function("prctl")
    if function is not None:
        function(option, value, 0, 0, 0)
