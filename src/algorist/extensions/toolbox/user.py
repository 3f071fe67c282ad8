"""A user's own tools and environments: their file is imported in a process of its own, which is killed when a call takes too long."""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from algorist.errors import ConfigError
from algorist.extensions.toolbox.base import Limits, Output, clipped
from algorist.store.redact import secret_variables
from algorist.types import Problem, Turn
from algorist_grader.child_process import START_S, Answer, Child
from algorist_grader.user_code import find_file, import_file, no_function

SECONDS = 30.0
"""Most seconds of one reply of an environment."""


@lru_cache(maxsize=64)
def _child(path: Path, memory_mb: int, process: int) -> Child:
    worker = "algorist.extensions.toolbox.user:prepare"
    return Child(worker, [str(path)], memory_mb=memory_mb, without=secret_variables())


class _File:
    """A file and its process."""

    def __init__(self, target: str, where: str, memory_mb: int) -> None:
        self.path, self.name = find_file(target, where)
        self.where, self.memory_mb = where, memory_mb

    def check(self) -> list[str]:
        """Import the file there; return the methods of the class that is named, of a function none.

        Raises:
            ConfigError: It cannot be imported, or has no such function or class.
        """
        answer = _child(self.path, self.memory_mb, os.getpid()).start(START_S)
        if answer.error:
            raise ConfigError(
                f"{self.where}: {self.path} cannot be imported: {answer.detail or answer.error}"
            )
        if self.name not in answer.value:
            raise ConfigError(f"{self.where}: {self.path} {no_function(self.name, [*answer.value])}")
        methods: list[str] = answer.value[self.name]
        return methods

    def ask(self, seconds: float, **request: Any) -> Answer:
        text = json.dumps({"name": self.name, **request}, default=str)
        return _child(self.path, self.memory_mb, os.getpid()).ask(text.encode(), seconds)


class UserTool:
    """A function ``(request: str) -> str`` of a user's file."""

    inline = False

    def __init__(self, target: str, limits: Limits) -> None:
        self.limits = limits
        self.file = _File(target, f"tools: {target}", max(limits.memory_mb, 256))
        # Read, not run: the prompt is made before the file is imported.
        self.description = f"input of {self.file.name}"
        with suppress(SyntaxError, ValueError):  # named when the file is imported
            for made in ast.parse(self.file.path.read_bytes()).body:
                if isinstance(made, ast.FunctionDef) and made.name == self.file.name:
                    self.description = (ast.get_docstring(made) or self.description).partition("\n")[0]

    def check(self) -> None:
        """Import the file."""
        self.file.check()

    def call(self, request: str, session: Any) -> Output:
        """Return what the function returns, as text."""
        answer = self.file.ask(self.limits.seconds, what="call", request=request)
        if answer.error:
            return Output(_said(answer), _class(answer))
        return Output(clipped(str(answer.value), self.limits.output_characters))


class UserEnvironment:
    """A class of a user's file: ``start(problem)`` once for each rollout, then ``reply(rollout) -> str | None`` when it has ended."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.file = _File(target, f"environment: {target}", 1024)
        self.failed: dict[int, Answer] = {}

    def check(self) -> None:
        """Import the file.

        Raises:
            ConfigError: It cannot be imported, or what it names is no environment.
        """
        methods = self.file.check()
        lacking = [name for name in ("start", "reply") if name not in methods]
        if lacking:
            raise ConfigError(
                f"environment: {self.target} has no {' and no '.join(lacking)}; expected a class with start(problem) and "
                f"reply(rollout) -> str | None (docs/tools.md). Its methods: {', '.join(methods) or 'none'}"
            )

    def begin(self) -> None:
        """Forget all rollouts."""
        self.failed.clear()
        self.file.ask(SECONDS, what="forget")

    def start(self, row: int, problem: Problem) -> None:
        columns = {"id": problem.id, **problem.columns()}
        answer = self.file.ask(SECONDS, what="start", row=row, problem=columns)
        if answer.error:
            self.failed[row] = answer

    def reply(self, row: int, completion: str, turns: Sequence[Turn]) -> Output | None:
        """Return the reply; None ends the rollout, an error does too, also that of ``start``."""
        rollout = {"text": completion, "turns": [asdict(turn) for turn in turns]}
        answer = self.failed.get(row) or self.file.ask(SECONDS, what="reply", row=row, rollout=rollout)
        if answer.error:
            return Output(_said(answer), _class(answer))
        return None if answer.value is None else Output(str(answer.value))


def _class(answer: Answer) -> str:
    if answer.error == "raised":
        return answer.detail.strip().rpartition("\n")[2].partition(":")[0] or "Error"
    return {"timeout": "TimeoutError", "memory": "MemoryError"}.get(answer.error, "Crashed")


def _said(answer: Answer) -> str:
    return answer.detail.strip().rpartition("\n")[2] if answer.error == "raised" else _class(answer)


# From here on: in the other process.


def prepare(file: str) -> tuple[Callable[[bytes], Any], dict[str, list[str]]]:
    """Import the file; return what answers requests, and its functions and classes with their methods."""
    sys.path.append(str(Path.cwd()))
    module = import_file(Path(file))
    names = {
        name: [k for k, v in inspect.getmembers(value) if callable(v) and not k.startswith("_")]
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
    }
    rows: dict[tuple[str, int], Any] = {}

    def answer(request: bytes) -> Any:
        asked = json.loads(request)
        what, entry = asked["what"], getattr(module, asked["name"])
        if what == "call":
            return _text(entry(asked["request"]))
        if what == "forget":
            rows.clear()
            return None
        key = (asked["name"], asked["row"])
        if what == "start":
            rows[key] = entry()
            rows[key].start(SimpleNamespace(**asked["problem"]))
            return None
        turns = [SimpleNamespace(**turn) for turn in asked["rollout"]["turns"]]
        reply = rows[key].reply(SimpleNamespace(text=asked["rollout"]["text"], turns=turns))
        return None if reply is None else _text(reply)

    return answer, names


def _text(value: Any) -> str:
    if not isinstance(value, (str, int, float)):
        raise TypeError(f"it returned {type(value).__name__}; expected a text")
    return str(value)
