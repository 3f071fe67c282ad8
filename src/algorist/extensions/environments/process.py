"""The process of a user's environments: it imports their file, and each rollout has a fork of it.

A fork holds one environment. One that hangs, dies or grows ends alone, and since each begins as the file was imported, with random
numbers of its problem and row, a rollout does not depend on those before it: a run that is resumed samples the same.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from algorist_grader.system import FORKS, memory_of
from algorist_grader.user_code import import_file

LONGEST = 16_384
"""Most characters of a reply."""
MOST_MEMORY = 4 * 2**30
"""Bytes that all environments of a file may hold together."""
ANY_ROW, DESCRIBED = -1, -2
"""Rows of a rollout that is only looked at, and of what describes classes."""
NOT_TOOLS = ("reset", "get_reward")


def prepare(file: str) -> tuple[Callable[[bytes], Any], list[str]]:
    """Import the file; return what answers requests, and the names of its functions and classes."""
    sys.path.append(str(Path.cwd()))
    random.seed(0)
    module = import_file(Path(file))
    names = [
        name
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
    ]
    rows: dict[int, _Fork | _Here] = {}

    def answer(request: bytes) -> Any:
        order = json.loads(request)
        row = order["row"]
        if order["what"] == "end":
            for key in [row] if row != ANY_ROW else list(rows):
                if key in rows:
                    rows.pop(key).end()
            return None
        if row not in rows:
            rows[row] = (_Fork if FORKS else _Here)(module)
        reply = rows[row].ask(request, order["seconds"])
        if not reply.get("error") and sum(other.memory for other in rows.values()) > MOST_MEMORY:
            reply = {"error": "memory"}
        if reply.get("error") not in (None, "", "raised") or row == ANY_ROW:
            rows.pop(row).end()
        return reply

    return answer, names


class _Fork:
    """One environment in a process of its own."""

    def __init__(self, module: Any) -> None:
        self.memory = self._number = 0
        self._shared = memory_of(os.getpid())
        self._pipe, other = Pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                os.setsid()
                self._pipe.close()
                _serve(other, _Held(module))
            finally:
                os._exit(0)
        other.close()

    def ask(self, request: bytes, seconds: float) -> dict[str, Any]:
        self._number += 1
        deadline = time.monotonic() + seconds
        with suppress(OSError, EOFError, ValueError):
            self._pipe.send_bytes(request)
            while self._pipe.poll(max(0.0, deadline - time.monotonic())):
                number, reply = json.loads(self._pipe.recv_bytes(64 * LONGEST))
                if number == self._number:  # not that of a fork that came back from the user's code
                    self.memory = memory_of(self._pid) - self._shared
                    return dict(reply)
            return {"error": "timeout"}
        return {"error": "crashed"}

    def end(self) -> None:
        for kill in (os.killpg, os.kill):
            with suppress(OSError):
                kill(self._pid, signal.SIGKILL)
        with suppress(OSError):
            os.waitpid(self._pid, 0)
        self._pipe.close()


class _Here:
    """One environment in this process, where nothing forks."""

    memory = 0

    def __init__(self, module: Any) -> None:
        self._held = _Held(module)

    def ask(self, request: bytes, seconds: float) -> dict[str, Any]:
        return self._held.reply(request)

    def end(self) -> None:
        """End nothing."""


def _serve(pipe: Any, held: _Held) -> None:
    number, me = 0, os.getpid()
    while True:
        request = pipe.recv_bytes()
        number += 1
        reply = held.reply(request)
        if os.getpid() != me:
            return
        pipe.send_bytes(json.dumps([number, reply]).encode())


class _Held:
    """An environment and what is done with it."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.environment: Any = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def reply(self, request: bytes) -> dict[str, Any]:
        order = json.loads(request)
        try:
            if order["what"] == "describe":
                return {"value": _describe(getattr(self.module, order["name"]))}
            if self.environment is None:
                self._begin(order)
            return {"value": getattr(self, f"_{order['what']}")(order)}
        except MemoryError:
            return {"error": "memory"}
        except BaseException as error:
            began = self.environment is not None
            return {"error": "raised", "kind": type(error).__name__, "detail": _said(error), "began": began}

    def _begin(self, order: Mapping[str, Any]) -> None:
        """Make the environment and start it with its problem; ``observation`` is what ``reset`` returned."""
        problem = order["problem"]
        _seed(problem["id"])
        environment: Any = getattr(self.module, order["name"])()
        self.observation = None
        if order["form"] == "trl":
            self.observation = _text(
                environment.reset(**_taken(environment.reset, order["columns"])), "reset"
            )
        else:
            environment.start(SimpleNamespace(**problem))
        if order.get("shown", self.observation) != self.observation:
            raise ValueError(
                "reset returned another text than before for the same problem, whose completions share a prompt; let it draw from the "
                "row, or with random or numpy.random"
            )
        self.environment = environment
        _seed(f"{problem['id']} {order['row']}")

    def _observe(self, order: Mapping[str, Any]) -> str | None:
        return self.observation

    def _reply(self, order: Mapping[str, Any]) -> str | None:
        rollout = order["rollout"]
        turns = [SimpleNamespace(**turn) for turn in rollout["turns"]]
        value = self._done(self.environment.reply(SimpleNamespace(text=rollout["text"], turns=turns)))
        value = _text(str(value) if isinstance(value, (int, float)) else value, "reply")
        return None if value is None else _short(value)

    def _call(self, order: Mapping[str, Any]) -> str:
        value = self._done(getattr(self.environment, order["method"])(**json.loads(order["arguments"])))
        if isinstance(value, list) and any(isinstance(part, dict) and "type" in part for part in value):
            raise TypeError("it returned content blocks, as for images; expected a text")
        return _short(value)

    def _score(self, order: Mapping[str, Any]) -> float | None:
        value = self._done(self.environment.get_reward())
        if isinstance(value, (str, bytes)):
            raise TypeError(f"get_reward returned {value!r:.80}; expected a number or None")
        return None if value is None else float(value)

    def _done(self, value: Any) -> Any:
        """Wait for what an async method returned."""
        if not inspect.isawaitable(value):
            return value
        self.loop = self.loop or asyncio.new_event_loop()

        async def wait() -> Any:
            return await value

        return self.loop.run_until_complete(wait())


def _describe(entry: Any) -> dict[str, Any]:
    """Describe an environment: its form, its tools as chat templates take them, whether it pays; or the reason why it is none."""
    kind = entry if inspect.isclass(entry) else type(entry())
    members = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"]
    if {"start", "reply"} <= {*members}:
        return {"form": "start", "tools": [], "pays": False}
    if "reset" not in members:
        lacking = [name for name in ("start", "reply") if name not in members]
        return {
            "refused": f"has no {' and no '.join(lacking)}; expected a class with start(problem) and reply(rollout) -> str | None, or "
            f"TRL's form: reset(**row), methods as tools, get_reward(). Its methods: {', '.join(members) or 'none'}"
        }
    from transformers.utils import get_json_schema

    environment, tools = entry(), []
    for name in members:
        if name not in NOT_TOOLS:
            try:
                tools.append(get_json_schema(getattr(environment, name)))
            except Exception as error:
                return {
                    "refused": f"has the method {name}, which cannot be described to the model as a tool: {_said(error)}. A method that is "
                    "no tool begins with _"
                }
    return {"form": "trl", "tools": tools, "pays": "get_reward" in members}


def _taken(function: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a function takes by name."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(columns)
    return {name: columns[name] for name in parameters if name in columns}


def _text(value: Any, method: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{method} returned {type(value).__name__}; expected a text or None")
    if value is not None and method == "reset" and len(value) > LONGEST:
        raise ValueError(f"reset returned {len(value):,} characters; expected at most {LONGEST:,}")
    return value


def _seed(text: str) -> None:
    """Set the random numbers of this process, and of the libraries that the user's file imported."""
    random.seed(text)
    number = zlib.crc32(text.encode())
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"


def _said(error: BaseException) -> str:
    """Return the message of an error, which may fail to tell."""
    try:
        return _short(error)
    except BaseException:
        return ""
