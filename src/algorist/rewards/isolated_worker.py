"""What the process of a user's reward file does (see ``child_process`` and ``isolated``)."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from algorist.user_file import functions_of, import_file


def prepare(file: str) -> tuple[Callable[[bytes], Any], dict[str, Any]]:
    """Import the file; return what answers a pickled ``(what, name, args, kwargs)``, and the names of its functions."""
    sys.path.append(str(Path.cwd()))
    module = import_file(Path(file))

    def answer(request: bytes) -> Any:
        what, name, args, kwargs = pickle.loads(request)
        if what == "describe":
            return describe(module, name)
        function = getattr(module, name)
        if what == "bounds":
            declared = _declared(function)
            assert declared is not None
            return list(declared.range_with(kwargs))
        return plain(function(*args, **kwargs))

    return answer, {"functions": functions_of(module)}


def describe(module: ModuleType, name: str) -> dict[str, Any]:
    """Return plain facts about a function: signature, declared range, what it was registered as."""
    function = getattr(module, name, None)
    if not callable(function):
        return {"callable": False}
    declared = _declared(function)
    about: dict[str, Any] = {
        "callable": True,
        "async": inspect.iscoroutinefunction(function),
        "doc": inspect.getdoc(function),
        "has_state": hasattr(function, "state_dict"),
        "low": float(getattr(function, "low", 0.0)),
        "high": float(getattr(function, "high", 1.0)),
        "parameters": [_parameter(p) for p in inspect.signature(function).parameters.values()],
        "registered": None,
    }
    if declared is not None:
        about["registered"] = {
            "name": declared.name,
            "ours": str(getattr(function, "__module__", "")).startswith("algorist."),
            "low": declared.low,
            "high": declared.high,
            "gold": declared.needs_gold,
            "source": declared.source,
            "aliases": list(declared.aliases),
            "has_bounds": declared.bounds is not None,
        }
    return about


def _declared(function: Any) -> Any:
    from algorist.rewards.base import REWARDS

    return next((REWARDS.get(name) for name in REWARDS if REWARDS.get(name).function is function), None)


def _parameter(parameter: inspect.Parameter) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": parameter.name,
        "kind": int(parameter.kind),
        "has_default": parameter.default is not parameter.empty,
    }
    if found["has_default"] and isinstance(parameter.default, (bool, int, float, str, type(None))):
        found["default"] = parameter.default
    return found


def plain(value: Any) -> Any:
    """Return a number, None, or a list of them for what a reward function returned.

    Raises:
        TypeError: It is something else.
    """
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, (str, bytes, dict)):
        raise TypeError(
            f"it returned {value!r:.80}; expected a number, or a list of one number per completion"
        )
    if getattr(value, "ndim", 0) or not hasattr(value, "__float__"):
        return [plain(v) for v in value]
    return float(value)
