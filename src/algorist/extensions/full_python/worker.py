"""Worker process of ``full_python``: imports, then a confined fork for each call."""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import json
import os
import platform
import random
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

MOST_OUTPUT = 1 << 16
_MODULES = (
    "math cmath fractions decimal statistics itertools functools collections heapq bisect operator string random re datetime "
    "typing dataclasses enum copy textwrap numbers sympy numpy"
).split()
_WARM = (
    "solve('x**2-1'); simplify('sin(x)**2+cos(x)**2'); integrate('x*exp(x)'); expand('(x+1)**3'); factor('x**2-1'); nsimplify(0.5); "
    "limit('sin(x)/x', 'x', 0); Matrix([[1, 2], [3, 4]]).det(); symbols('a b'); Rational(1, 3); summation('k', ('k', 1, 9)); factorint(12); "
    "diff('x**2', 'x'); sqrt(2).evalf(); solve(['x+y-3', 'x-y-1']); latex(sqrt(2)); binomial(5, 2); str(solveset('x**2-4', 'x'))"
)
_PRCTL_NO_NEW_PRIVILEGES, _PRCTL_SECCOMP, _FILTER = 38, 22, 2
_X86_64 = 0xC000003E
_ALLOWED = (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 28, 35, 39, 60, 96, 98, 100, 131, 186, 201, 202, 219, 228, 229, 230, 231, 318, 334)  # fmt: skip
"""read write close fstat lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn sched_yield mremap madvise nanosleep
getpid exit gettimeofday getrusage times sigaltstack gettid time futex restart_syscall clock_gettime clock_getres clock_nanosleep
exit_group getrandom rseq: memory, time, and the files that are open."""


def prepare() -> tuple[Callable[[bytes], Any], str]:
    """Import the modules that code may use, and check that a fork is confined."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise OSError(
            f"it needs Linux on x86-64 to confine code; this is {sys.platform} on {platform.machine()}"
        )
    for name in _MODULES:
        __import__(name)
    exec(f"from sympy import *\n{_WARM}", {})
    tried = "import os\ntry: os.open('/', 0)\nexcept PermissionError: print('confined')"
    said, _ = answer(json.dumps({"seconds": 10, "memory_mb": 256, "codes": [tried]}).encode())
    if said != "confined":
        raise OSError(f"this system does not confine processes (seccomp): {said}")
    return answer, ""


def answer(request: bytes) -> list[str]:
    """Run the last code in a fork after the others; return its output and the class of its error."""
    settings = json.loads(request)
    source, sink = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            _confine(sink, settings["memory_mb"], settings["seconds"])
            os.write(sink, json.dumps(_ran(settings["codes"])).encode())
        finally:
            os._exit(0)
    os.close(sink)
    body, until = b"", time.monotonic() + settings["seconds"]
    try:
        while (left := until - time.monotonic()) > 0 and len(body) <= 8 * MOST_OUTPUT:
            if select.select([source], [], [], left)[0]:
                part = os.read(source, MOST_OUTPUT)
                if not part:
                    break
                body += part
        late = left <= 0
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(source)
    with contextlib.suppress(ValueError, TypeError):
        text, error = json.loads(body)
        return [str(text).encode(errors="replace").decode(), str(error)]
    return (
        ["TimeoutError"] * 2
        if late
        else ["the call ended without an output: out of memory, or a crash", "Died"]
    )


def _confine(sink: int, memory_mb: int, seconds: float) -> None:
    """Leave this process memory, time and one pipe."""
    null = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(null, handle)
    os.closerange(3, sink)
    os.closerange(sink + 1, 1 << 16)
    from algorist_grader.system import limit_memory

    limit_memory(memory_mb)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    sys.setrecursionlimit(500)
    random.seed(0)
    count = len(_ALLOWED)
    lines = [(0x20, 0, 0, 4), (0x15, 0, count + 1, _X86_64), (0x20, 0, 0, 0)]
    lines += [(0x15, count - place, 0, number) for place, number in enumerate(_ALLOWED)]
    lines += [(0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]  # not permitted; permitted
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PRCTL_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_PRCTL_SECCOMP, _FILTER, program, 0, 0):
        os._exit(1)


class _Printed:
    """Output stream that keeps text up to a length."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += str(text)[: MOST_OUTPUT - len(self.text)]
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


def _ran(codes: list[str]) -> tuple[str, str]:
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    printed = _Printed()
    try:
        for code in codes:
            printed = sys.stdout = sys.stderr = _Printed()  # type: ignore[assignment]
            tree = ast.parse(code)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<call>", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<call>", "eval"), names)
                if value is not None:
                    printed.write(value if isinstance(value, str) and "\n" in value else repr(value))
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"[:1000]
        return f"{printed.text[:MOST_OUTPUT]}{said.strip()}", type(error).__name__
    return printed.text.rstrip("\n"), ""
