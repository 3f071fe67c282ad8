"""The program of a ``child_process.Child``: a guardian, and the worker that it forks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from algorist_grader import system
from algorist_grader.child_process import HEAD, MAX_ANSWER
from algorist_grader.errors import named


def _main(memory_mb: str, target: str, *arguments: str) -> None:
    """Work, guarded."""
    system.guard()
    _work(memory_mb, target, arguments)


def _work(memory_mb: str, target: str, arguments: Sequence[str]) -> None:
    """Prepare, say so, and answer until the input ends."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    system.ignore_stopping()  # the run's business, which ends this process when it is done
    me = os.getpid()

    def send(number: int, content: dict[str, Any]) -> None:
        if os.getpid() != me:
            os._exit(1)  # a fork that came back from the user's code
        body = json.dumps(content).encode()
        if len(body) > MAX_ANSWER:
            body = json.dumps(
                {"error": "size", "detail": f"Crashed: its answer has {len(body)} bytes"}
            ).encode()
        sink.write(HEAD.pack(number, len(body)) + body)
        sink.flush()

    module, _, name = target.partition(":")
    try:
        answer, about = getattr(import_module(module), name)(*arguments)
    except BaseException as error:
        send(0, {"error": "raised", "detail": _said(error)})
        return
    limited = not memory_mb or system.limit_memory(int(memory_mb))
    send(0, {"value": {"pid": me, "about": about, "limited": limited}})
    while len(head := source.read(HEAD.size)) == HEAD.size:
        number, length = HEAD.unpack(head)
        reply: dict[str, Any]
        try:
            reply = {"value": answer(source.read(length))}
        except MemoryError:
            reply = {"error": "memory", "detail": f"MemoryError: it took more than {memory_mb} MiB of memory"}
        except BaseException as error:  # SystemExit and math-verify's timeout are no Exceptions
            reply = {"error": "raised", "detail": _said(error)}
        send(number, reply)


def _said(error: BaseException) -> str:
    """Return the error and the end of its traceback."""
    import traceback

    return f"{named(error)}\n{''.join(traceback.format_exception(error, limit=-20))[-8000:]}"


if __name__ == "__main__":
    _main(*sys.argv[1:])
