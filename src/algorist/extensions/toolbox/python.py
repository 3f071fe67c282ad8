"""Python in a sandbox: pydantic-monty, an interpreter in worker processes of its own, without files, network or processes.

A rollout's calls share their variables: after each call the session is written out (a few kilobytes, 0.1 ms) and the next one starts
from it, so no worker is held while the model writes. Clock and random numbers of a session are fixed: a rollout that is sampled again
gets the same outputs.
"""

from __future__ import annotations

import atexit
import datetime
import os
import shlex
import shutil
import sysconfig
import tempfile
import textwrap
import threading
from pathlib import Path
from typing import Any

from algorist.errors import MissingExtraError
from algorist.extensions.toolbox.base import Output, ToolLimits, clipped, tool

MOST_CODE = 20_000
"""Longest code of a call (characters)."""
MOST_SESSION = 2 * 2**20
"""Largest session that is kept for the next call (bytes)."""
RECURSION = 200
_LIMITS = ("TimeoutError", "MemoryError")
_GRACE_S = 1.0
_POLICY = {
    "datetime": datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC),
    "sleep": "zero",
    "random_start": {"seed": 0},
}
_pools: dict[tuple[int, float], Any] = {}
_lock = threading.Lock()


def _pool(seconds: float) -> Any:
    """Return this process's pool of workers, started at its first call."""
    with _lock:
        key = (os.getpid(), seconds)
        if key not in _pools:
            monty = _monty()
            for binary in (
                _silent_binary(),
                None,
            ):  # a folder of temporary files may forbid to start programs
                pool = monty.Monty(
                    binary_path=binary,
                    max_processes=os.cpu_count() or 1,
                    request_timeout=seconds + 5 * _GRACE_S,
                    feed_duration_limit_grace=_GRACE_S,
                )
                try:
                    _pools[key] = pool.__enter__()
                    break
                except (OSError, RuntimeError, monty.MontyError):
                    if binary is None:
                        raise
        return _pools[key]


def _silent_binary() -> Path | None:
    """Return a script that starts the sandbox's worker without its messages, which would stand between the lines of a run."""
    found = shutil.which("monty", path=sysconfig.get_path("scripts"))
    if found is None or os.name != "posix":
        return None
    folder = Path(tempfile.mkdtemp(prefix="algorist-tools-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    script = folder / "monty"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(found)} "$@" 2>/dev/null\n', encoding="utf-8")
    script.chmod(0o700)
    return script


@atexit.register
def close_pools() -> None:
    """End the workers of this process."""
    with _lock:
        for key in [key for key in _pools if key[0] == os.getpid()]:
            _pools.pop(key).__exit__(None, None, None)


def _monty() -> Any:
    try:
        import pydantic_monty
    except ImportError:
        raise MissingExtraError(
            "the tool 'python' needs the sandbox pydantic-monty: pip install 'algorist[tools]', or take tools: [calculator]"
        ) from None
    return pydantic_monty


class _Printed:
    """Takes what the code prints, up to a number of characters."""

    def __init__(self, most: int) -> None:
        self.most, self.text = most, ""

    def __call__(self, stream: str, text: str) -> None:
        if len(self.text) <= self.most:
            self.text += text[: self.most + 1]


@tool("python")
class Python:
    """Runs code in the sandbox; the output is what it prints, and the value of its last expression."""

    description = "Python code; its output is what it prints and the value of its last line (modules: math, itertools, re, decimal)"
    inline = False

    def __init__(self, limits: ToolLimits) -> None:
        self.limits = limits
        self._limits = {
            "max_feed_duration_secs": limits.seconds,
            "max_memory": limits.memory_mb * 2**20,
            "max_recursion_depth": RECURSION,
            "max_suspensions": 1000,
            "max_total_sleep_secs": limits.seconds,
        }

    def check(self) -> None:
        """Start a worker and run a line.

        Raises:
            MissingExtraError: The sandbox is not installed, or does not run here.
        """
        found = self.call("1 + 1", None)
        if found.text != "2":
            raise MissingExtraError(
                f"the sandbox pydantic-monty does not run here ({found.error}: {found.text}); install it again: "
                "pip install --force-reinstall 'algorist[tools]', or take tools: [calculator]"
            )

    def call(self, request: str, session: bytes | None) -> Output:
        """Run code in the session that the rollout's last call left."""
        monty, most = _monty(), self.limits.output_characters
        printed, code = _Printed(most), textwrap.dedent(request).strip()
        if len(code) > MOST_CODE:
            return Output(f"Error: more than {MOST_CODE} characters of code", "TooLong", session)
        text = error = ""
        kept = session
        try:
            with _pool(self.limits.seconds).checkout(limits=self._limits, os_policy=_POLICY) as worker:
                if session is not None:
                    worker.load_session(session)
                text, error = self._run(worker, code, printed)
                # After a limit was passed the sandbox promises nothing about its variables.
                if error not in _LIMITS:
                    kept = worker.dump()
        except (monty.MontyError, RuntimeError, OSError, ValueError) as lost:
            if not (text or error):
                crashed = isinstance(lost, monty.MontyCrashedError)
                late = getattr(lost, "timed_out", False)
                error = "TimeoutError" if late else "Crashed" if crashed else _name(lost)
                text = f"{clipped(printed.text, most - 200)}{error if crashed else _message(lost)}"
        if kept is not None and len(kept) > MOST_SESSION:
            kept, text = session, f"{text}\n(variables too large to keep)".lstrip("\n")
        return Output(clipped(text.rstrip("\n"), most), error, kept)

    def _run(self, worker: Any, code: str, printed: _Printed) -> tuple[str, str]:
        """Return the output and the class of the error."""
        try:
            value = worker.feed_run(code, print_callback=printed)
            return printed.text + ("" if value is None else _shown(value)), ""
        except _monty().MontyCrashedError:
            raise
        except Exception as raised:
            text = clipped(printed.text, self.limits.output_characters - 200)
            return f"{text}{_message(raised)}", _name(raised)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and "\n" in value else repr(value)


def _name(raised: BaseException) -> str:
    inner = getattr(raised, "exception", None)
    return type(inner() if callable(inner) else raised).__name__


def _message(raised: BaseException) -> str:
    display = getattr(raised, "display", None)
    text = str(display("type-msg")) if callable(display) else f"{type(raised).__name__}: {raised}"
    return text.strip().rpartition("\n")[2]
