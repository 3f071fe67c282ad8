"""The process of a user's environment class: it imports the file, and each rollout has a fork of it.

A fork holds one environment. One that hangs, dies or grows ends alone, and since each begins as the file was imported, with random
numbers of its problem and row, a rollout does not depend on those before it: a run that is resumed samples the same.
Replies have the parts of ``algorist_grader.child_process.Answer``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import getmembers, isclass, iscoroutine, isfunction, signature
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from algorist.extensions.toolbox.base import clipped
from algorist_grader.child_process import START_S
from algorist_grader.errors import named
from algorist_grader.system import FORKS, memory_of
from algorist_grader.user_code import import_file, no_function

LONGEST = 16_384
"""Most characters of a reply."""
MEMORY_MB = 1024
"""Most memory of an environment (MiB), beyond that of its file."""
MOST_MEMORY = 4 * 2**30
"""Bytes that all environments of a class may hold together."""
Reply = dict[str, Any]
_MEMORY: Reply = {"error": "memory", "detail": f"MemoryError: it took more than {MEMORY_MB} MiB of memory"}
_DIED: Reply = {"error": "crashed", "detail": "Crashed: its process died"}


def prepare(file: str, name: str) -> tuple[Callable[[bytes], Reply], Mapping[str, Any]]:
    """Import the file; return what answers requests, and the description of the class, or why it is ``refused``."""
    sys.path.append(str(Path.cwd()))
    random.seed(0)
    module = import_file(Path(file))
    if not hasattr(module, name):
        return (lambda request: _DIED), {"refused": no_function(name, [*dict(getmembers(module, isclass))])}
    rows = _Rows(getattr(module, name))
    reply = rows.once({"what": "describe", "seconds": START_S})
    return rows.answer, reply.get("value") or {"refused": f"cannot be made: {reply['detail']}"}


class _Rows:
    """The environments of the rollouts of a request."""

    def __init__(self, entry: Any) -> None:
        self.entry = entry
        self.rows: dict[int, Any] = {}
        """By row: an environment; None before its first call; its last reply where it has ended."""

    def once(self, order: Mapping[str, Any]) -> Reply:
        """Ask an environment that is of no rollout."""
        row = KIND(self.entry)
        reply = row.ask(order)
        row.end()
        return reply

    def answer(self, request: bytes) -> Reply:
        order = json.loads(request)
        what, number = order["what"], order["row"]
        if what == "rows":
            for row in self._alive():
                row.end()
            self.rows = dict.fromkeys(range(order["rows"]))
            return {}
        if number is None:
            return self.once(order)
        row = self.rows.get(number, _DIED)  # not there: this process is not the one that began it
        if row is None:
            row = self.rows[number] = KIND(self.entry)
        if isinstance(row, dict):
            return row
        reply = row.ask(order)
        if not reply.get("error") and sum(other.memory for other in self._alive()) > MOST_MEMORY:
            reply = _MEMORY
        if what == "score" or reply.get("error", "raised") != "raised":
            row.end()
            self.rows[number] = reply
        return reply

    def _alive(self) -> list[Any]:
        return [row for row in self.rows.values() if isinstance(row, KIND)]


class _Environment:
    """An environment and what is done with it; in this process where nothing forks."""

    memory = 0

    def __init__(self, entry: Any) -> None:
        self.entry, self.runner = entry, asyncio.Runner()
        self.environment: Any = None

    def end(self) -> None:
        """End nothing."""

    def ask(self, order: Mapping[str, Any]) -> Reply:
        try:
            if self.environment is None and order["what"] not in ("describe", "begin"):
                self._begin(order)
            return {"value": getattr(self, f"_{order['what']}")(order)}
        except MemoryError:
            return _MEMORY
        except BaseException as error:
            return {"error": "crashed" if self.environment is None else "raised", "detail": named(error)}

    def _describe(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Return form, tools as chat templates take them, and whether it pays; or why it is ``refused``: it is no environment."""
        kind = self.entry if isclass(self.entry) else type(self.entry())
        members = [name for name, _ in getmembers(kind, isfunction) if name[0] != "_"]
        if {"start", "reply"} <= {*members}:
            return {"form": "start", "tools": [], "pays": False}
        if "reset" not in members:
            lacking = [f"no {name}" for name in ("start", "reply") if name not in members]
            return {
                "refused": f"has {' and '.join(lacking)}; expected a class with start(problem) and reply(rollout) -> str | None, or TRL's form: "
                f"reset(**row), methods as tools, get_reward(). Its methods: {', '.join(members) or 'none'}"
            }
        from transformers.utils import get_json_schema

        environment, tools = self.entry(), []
        for name in (name for name in members if name not in ("reset", "get_reward")):
            try:
                tools.append(get_json_schema(getattr(environment, name)))
            except Exception as error:
                return {
                    "refused": f"has the method {name}, which cannot be described to the model as a tool: {error}. A method that is no tool "
                    "begins with _"
                }
        return {"form": "trl", "tools": tools, "pays": "get_reward" in members}

    def _begin(self, order: Mapping[str, Any]) -> str | None:
        """Make the environment and start it with its problem; return the text of ``reset``."""
        text = None
        _seed(order["id"])
        environment = self.entry()
        if order["form"] == "trl":
            text = _text(environment.reset(**_taken(environment.reset, order["columns"])), "reset")
        else:
            environment.start(SimpleNamespace(**{"id": order["id"], **order["columns"]}))
        if order.get("shown", text) != text:
            raise ValueError(
                "reset returned another text than before for the same problem, whose completions share a prompt; let it draw from the "
                "row, or with random or numpy.random"
            )
        self.environment = environment
        _seed(f"{order['id']} {order['row']}")
        return text

    def _reply(self, order: Mapping[str, Any]) -> str | None:
        turns = [SimpleNamespace(**turn) for turn in order["turns"]]
        value = self._done(self.environment.reply(SimpleNamespace(text=order["text"], turns=turns)))
        return _text(str(value) if isinstance(value, (int, float)) else value, "reply")

    def _call(self, order: Mapping[str, Any]) -> str:
        value = self._done(getattr(self.environment, order["method"])(**json.loads(order["arguments"])))
        if isinstance(value, list) and any(isinstance(part, dict) and "type" in part for part in value):
            raise TypeError("it returned content blocks, as for images; expected a text")
        return clipped(str(value), LONGEST)

    def _score(self, order: Mapping[str, Any]) -> float | None:
        value = self._done(self.environment.get_reward())
        if isinstance(value, (str, bytes)):
            raise TypeError(f"get_reward returned {value!r:.80}; expected a number or None")
        return None if value is None else float(value)

    def _done(self, value: Any) -> Any:
        """Wait for what an async method returned."""
        return self.runner.run(value) if iscoroutine(value) else value


class _Fork:
    """An environment in a process of its own."""

    def __init__(self, entry: Any) -> None:
        self.memory, self._shared = 0, memory_of(os.getpid())
        self._pipe, pipe = Pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                os.setsid()
                self._pipe.close()
                environment, me = _Environment(entry), os.getpid()
                while True:
                    reply = environment.ask(json.loads(pipe.recv_bytes()))
                    if os.getpid() != me:  # a fork that came back from the user's code
                        break
                    pipe.send_bytes(json.dumps(reply).encode())
            finally:
                os._exit(0)
        pipe.close()

    def end(self) -> None:
        for kill in (os.killpg, os.kill):
            with suppress(OSError):
                kill(self._pid, signal.SIGKILL)
        with suppress(OSError):
            os.waitpid(self._pid, 0)
        self._pipe.close()

    def ask(self, order: Mapping[str, Any]) -> Reply:
        with suppress(OSError, EOFError, ValueError):
            self._pipe.send_bytes(json.dumps(order).encode())
            if not self._pipe.poll(order["seconds"]):
                detail = f"TimeoutError: it took longer than {order['seconds']:g} s"
                return {"error": "timeout", "detail": detail}
            reply = json.loads(self._pipe.recv_bytes(64 * LONGEST))
            self.memory = memory_of(self._pid) - self._shared
            return dict(reply)
        return _DIED


KIND: Any = _Fork if FORKS else _Environment


def _taken(function: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a function takes by name."""
    parameters = signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in columns.items() if takes_all or name in parameters}


def _text(value: Any, method: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{method} returned {type(value).__name__}; expected a text or None")
    if value and method == "reset" and len(value) > LONGEST:
        raise ValueError(f"reset returned {len(value):,} characters; expected at most {LONGEST:,}")
    return value and clipped(value, LONGEST)


def _seed(text: str) -> None:
    """Set the random numbers of this process, and of the libraries that the user's file imported."""
    random.seed(text)
    number = zlib.crc32(text.encode())
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)
