"""What the process of a user's tools and environments does (see ``child_process`` and ``user``)."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from algorist.user_code import import_file


def prepare(file: str) -> tuple[Callable[[bytes], Any], list[str]]:
    """Import the file; return what answers requests, and the names of its functions and classes."""
    sys.path.append(str(Path.cwd()))
    module = import_file(Path(file))
    names = [
        name
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
    ]
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
