"""A user's own reward: ``file.py:function``, on one completion like ours, or in TRL's call form."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from algorist.errors import ConfigError, nearest
from algorist.rewards.base import REWARDS, Reward, make_reward
from algorist.rewards.isolated import Isolated

_FORMS = "def f(completion, *, gold): …  or, as TRL calls it,  def f(completions, **kwargs): …"


BOUND = ("trainer_state", "log_metric", "log_extra", "environments")
"""What TRL passes and another process cannot be given; a function that names one of them runs in this process."""
TIMEOUT_S = 30.0
"""Seconds that one call of a user's function may take, unless the recipe says otherwise."""


@dataclass(frozen=True)
class BatchReward:
    """A reward in TRL's call form. ``low`` is what completions get when it raises (``f.low = -1.0`` sets it)."""

    name: str
    function: Callable[..., Sequence[float | None]]
    low: float = 0.0
    high: float = 1.0

    def range_with(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return the declared range; a function in this form may take any parameter."""
        return self.low, self.high

    def call(self, given: Mapping[str, Any]) -> Sequence[float | None]:
        """Call the function with what its signature takes of ``given``; with everything if it has ``**kwargs``."""
        parameters = inspect.signature(self.function).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            # Not part of TRL's call, or bound to this process: only for those who name them.
            own = ("matcher", "prefilled", "tags", *BOUND)
            return self.function(**{k: v for k, v in given.items() if k in parameters or k not in own})
        return self.function(**{key: value for key, value in given.items() if key in parameters})


def load_user_reward(target: str, *, timeout_s: float = TIMEOUT_S) -> Reward | BatchReward:
    """Load ``file.py:function``; calls run in another process and are killed after ``timeout_s`` seconds.

    A function with a ``state_dict`` or one that asks for what only this process has (``trainer_state``, ``log_metric``,
    ``log_extra``) runs here, without a limit.

    A first parameter called ``completions`` (or ``prompts``, or only ``**kwargs``) means TRL's call form, anything
    else a reward of one completion, which names what it needs like those in the registry. A function may carry
    ``low`` and ``high`` attributes, or be decorated with ``@reward``.

    Raises:
        ConfigError: No such file or function, a file that cannot be imported, or a signature that fits neither form.
    """
    file, _, name = target.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(
            f"reward '{target}': no file at {path.resolve()}.{nearest(path.name, beside)} "
            f"Write file.py:function with a path from {Path.cwd()}"
        )
    try:
        module = import_file(path.resolve())
    except Exception as error:
        raise ConfigError(f"reward '{target}': {path} cannot be imported: {error!r}") from error
    function = getattr(module, name, None)
    if not inspect.isroutine(function) and not callable(function):
        there = [
            k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__
        ]
        raise ConfigError(
            f"reward '{target}': {path} has no function '{name}'.{nearest(name, there)} "
            f"There are: {', '.join(there) or 'none'}"
        )
    return _wrap(target, name, function, path.resolve(), timeout_s)


def _wrap(
    target: str, name: str, function: Callable[..., Any], path: Path, timeout_s: float
) -> Reward | BatchReward:
    for known in REWARDS:
        if REWARDS.get(known).function is function:
            return REWARDS.get(known)
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"reward '{target}' is async; write an ordinary function: {_FORMS}")
    parameters = list(inspect.signature(function).parameters.values())
    names = [p.name for p in parameters]
    if not parameters:
        raise ConfigError(f"reward '{target}' takes no arguments; expected {_FORMS}")
    isolated = not hasattr(function, "state_dict") and not set(names) & set(BOUND)
    return as_reward(name, function, Isolated(function, path, name, timeout_s) if isolated else None)


def as_reward(
    name: str, function: Callable[..., Any], runs_as: Callable[..., Any] | None = None
) -> Reward | BatchReward:
    """Return a function as a reward of one completion, or of a batch where its signature is TRL's.

    Args:
        name: The reward's name.
        function: Its signature and its ``low`` and ``high`` count.
        runs_as: What is called; the function itself, in this process, when left out.
    """
    parameters = list(inspect.signature(function).parameters.values())
    low, high = float(getattr(function, "low", 0.0)), float(getattr(function, "high", 1.0))
    names, called = [p.name for p in parameters], runs_as or function
    if "completions" in names or names[:1] == ["prompts"] or parameters[0].kind is parameters[0].VAR_KEYWORD:
        return BatchReward(name, called, low, high)
    return make_reward(name, called, low=low, high=high)


def import_file(path: Path) -> ModuleType:
    """Import a file by its resolved path."""
    return _module(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _module(path: Path, modified_ns: int) -> ModuleType:
    """Import a file by path; a file that has changed since is imported anew."""
    name = f"algorist_user_rewards_{path.stem}_{abs(hash((path, modified_ns))):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling in the user's file look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
