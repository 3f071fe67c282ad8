"""A user's own tools: their file is imported in a process of its own, which is killed when a call takes too long."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from algorist.errors import ConfigError
from algorist.extensions.toolbox.base import Output, ToolLimits, clipped
from algorist.store.redact import secret_variables
from algorist_grader.child_process import START_S, Child
from algorist_grader.user_code import find_file, functions_of, import_file, no_function


@lru_cache(maxsize=64)
def _child(path: Path, modified_ns: int, memory_mb: int, process: int) -> Child:
    worker = "algorist.extensions.toolbox.user:prepare"
    return Child(worker, [str(path)], memory_mb=memory_mb, without=secret_variables())


class UserTool:
    """A function ``(request: str) -> str`` of a user's file."""

    inline = False

    def __init__(self, target: str, limits: ToolLimits) -> None:
        self.limits, self.where, self.memory_mb = limits, f"tools: {target}", max(limits.memory_mb, 256)
        self.path, self.name = find_file(target, self.where)
        self.modified_ns = self.path.stat().st_mtime_ns
        # Read, not run: the prompt is made before the file is imported.
        self.description = f"input of {self.name}"
        with suppress(SyntaxError, ValueError):  # named when the file is imported
            for made in ast.parse(self.path.read_bytes()).body:
                if isinstance(made, ast.FunctionDef) and made.name == self.name:
                    self.description = (ast.get_docstring(made) or self.description).partition("\n")[0]

    def check(self) -> None:
        """Import the file as it is now; its calls are answered by that until the next check.

        Raises:
            ConfigError: It cannot be imported, or has no such function.
        """
        find_file(f"{self.path}:{self.name}", self.where)
        if (modified_ns := self.path.stat().st_mtime_ns) != self.modified_ns:
            self._process().close()
            self.modified_ns = modified_ns
        answer = self._process().start(START_S)
        if answer.error:
            raise ConfigError(f"{self.where}: {self.path} cannot be imported: {answer.said}")
        if self.name not in answer.value:
            raise ConfigError(f"{self.where}: {self.path} {no_function(self.name, answer.value)}")

    def call(self, request: str, session: Any) -> Output:
        """Return what the function returns, as text."""
        text = json.dumps({"name": self.name, "request": request}).encode()
        answer = self._process().ask(text, self.limits.seconds)
        if answer.error:
            return Output(answer.said, answer.kind)
        return Output(clipped(str(answer.value), self.limits.output_characters))

    def _process(self) -> Child:
        return _child(self.path, self.modified_ns, self.memory_mb, os.getpid())


# From here on: in the other process.


def prepare(file: str) -> tuple[Callable[[bytes], Any], list[str]]:
    """Import the file; return what answers requests, and the names of its functions."""
    sys.path.append(str(Path.cwd()))
    module = import_file(Path(file))

    def answer(request: bytes) -> Any:
        order = json.loads(request)
        value = getattr(module, order["name"])(order["request"])
        if not isinstance(value, (str, int, float)):
            raise TypeError(f"it returned {type(value).__name__}; expected a text")
        return str(value)

    return answer, functions_of(module)
