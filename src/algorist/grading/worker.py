"""The process that does slow work: one JSON line in, one JSON line out, under limits that the kernel enforces.

Started by ``workers`` as ``python -P -m algorist.grading.worker MATCHER SECONDS MEGABYTES``. Ends when its input ends, when a
job outlives its alarm (also inside a C call: the signal's default action ends the process), or at the memory limit. Where a
package of the matcher cannot be imported, the only line is ``{"missing": "…"}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from algorist.errors import MissingExtraError

Judge = Callable[[str, str], "bool | None"]


def limit_memory(megabytes: int) -> None:
    """Set the address space limit; it counts what is mapped, so the interpreter's own share comes on top."""
    import resource

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = mapped + megabytes * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def serve(judge: Judge, seconds: float) -> None:
    """Answer jobs until the input ends."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sink.write(b'{"ready": true}\n')
    for line in source:
        signal.setitimer(signal.ITIMER_REAL, seconds + 1.0)
        found: dict[str, Any]
        try:
            job = json.loads(line)
            found = {"told": judge(job["answer"], job["gold"])}
        except MemoryError:
            found = {"error": "memory"}
        except RecursionError:
            found = {"error": "crashed"}
        except BaseException as error:  # math-verify's timeout is a BaseException
            found = {"error": "crashed", "message": type(error).__name__}
        signal.setitimer(signal.ITIMER_REAL, 0)
        sink.write(json.dumps(found).encode() + b"\n")
        if found.get("error") == "memory":
            return


def main(matcher: str, seconds: str, megabytes: str) -> None:
    """Load the judge of a matcher, set the limits, serve."""
    sys.setrecursionlimit(3_000)
    if matcher == "latex_verify":
        try:
            from algorist.grading.math_verify import latex_verify as judge
        except MissingExtraError as error:
            os.write(1, json.dumps({"missing": str(error)}).encode() + b"\n")
            return
    else:
        from algorist.grading.slow import judge
    with contextlib.suppress(ImportError, OSError, ValueError):
        limit_memory(int(megabytes))
    serve(judge, float(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:4])
