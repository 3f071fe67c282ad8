"""A user's reward function in a process of its own: one that hangs is killed, one that crashes takes nothing with it.

A loop without end inside a regular expression or a C extension cannot be stopped from within the process, so the
function runs in another one, loaded from the same file. Arguments go there pickled, numbers come back as JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import pickle
import selectors
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from algorist.errors import RewardError

START_S = 60.0
MAX_TIMEOUTS = 3
"""So many time-outs in a row end the run: the function hangs always, not on one completion."""
_ROOT = str(Path(__file__).resolve().parents[2])
_open: weakref.WeakSet[Isolated] = weakref.WeakSet()


class Isolated:
    """Callable like ``function``, which lives in ``file`` under ``name``; each call may take ``timeout_s`` seconds.

    Raises, when called:
        TimeoutError: The call took too long (the process is killed, the next call starts a new one).
        RewardError: ``MAX_TIMEOUTS`` calls in a row took too long.
        RuntimeError: The function raised, or the process died; the message holds its traceback.
    """

    def __init__(self, function: Callable[..., Any], file: Path, name: str, timeout_s: float) -> None:
        functools.update_wrapper(self, function)
        self.file, self.name, self.timeout_s = file, name, timeout_s
        self.timeouts_in_a_row = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        _open.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returned: a number, None, or a list of them."""
        payload = pickle.dumps((args, kwargs))
        process = self._process
        if process is None or self._owner != os.getpid() or process.poll() is not None:
            process = self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(struct.pack("<Q", len(payload)) + payload)
            process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self._died(process)) from None
        line = self._line(process, self.timeout_s)
        if line is None:
            self.close()
            self.timeouts_in_a_row += 1
            if self.timeouts_in_a_row >= MAX_TIMEOUTS:
                raise RewardError(
                    f"reward function '{self.name}' in {self.file} took longer than {self.timeout_s:g} s "
                    f"{MAX_TIMEOUTS} times in a row, so it hangs rather than works. Correct it and continue with --resume, "
                    "or give it more time: rewards: [{name: …, timeout_s: 120}]"
                )
            raise TimeoutError(f"it took longer than {self.timeout_s:g} s and was killed")
        if not line:
            raise RuntimeError(self._died(process))
        self.timeouts_in_a_row = 0
        told = json.loads(line)
        if "error" in told:
            raise RuntimeError(told["error"])
        return told["value"]

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [_ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "algorist.rewards.isolated_worker", str(self.file), self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        if not self._line(self._process, START_S):  # it says when the file is loaded
            raise RuntimeError(self._died(self._process))
        return self._process

    @staticmethod
    def _line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
        """Return a line of the answer, empty when the process died, None when time is up."""
        assert process.stdout is not None
        deadline, parts = time.monotonic() + timeout_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not parts.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    return b""
                parts += part
        return parts

    def _died(self, process: subprocess.Popen[bytes]) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        self.close()
        return f"its process died (exit code {process.returncode})"

    def close(self) -> None:
        """End the process, if there is one and it is ours."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()


def _close_all() -> None:
    for isolated in list(_open):
        isolated.close()


atexit.register(_close_all)
