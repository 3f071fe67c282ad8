"""A user's own reward: ``file.py:function``, on one completion like ours, or in TRL's call form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from algorist.errors import ConfigError
from algorist.rewards.base import REWARDS, Reward
from algorist.rewards.isolated import Isolated, user_file
from algorist.user_file import find_file, import_file, no_function

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
    """Load ``file.py:function``; the file is imported in another process, and calls are killed after ``timeout_s`` seconds.

    A function with a ``state_dict`` or one that asks for what only this process has (``trainer_state``, ``log_metric``,
    ``log_extra``) runs here, without a limit; only then is its file imported here too.

    A first parameter called ``completions`` (or ``prompts``, or only ``**kwargs``) means TRL's call form, anything
    else a reward of one completion, which names what it needs like those in the registry. A function may carry
    ``low`` and ``high`` attributes, or be decorated with ``@reward``.

    Raises:
        ConfigError: No such file or function, a file that cannot be imported, or a signature that fits neither form.
    """
    path, name = find_file(target, f"reward '{target}'")
    return _load(target, path, path.stat().st_mtime_ns, name, timeout_s)


@lru_cache(maxsize=256)
def _load(target: str, path: Path, modified_ns: int, name: str, timeout_s: float) -> Reward | BatchReward:
    file = user_file(path)
    try:
        there = file.functions()
        about = file.describe(name)
    except (RuntimeError, TimeoutError) as error:
        file.child.close()
        raise ConfigError(
            f"reward '{target}': {path} cannot be imported: {(str(error).splitlines() or ['?'])[0]}"
        ) from None
    if not about["callable"]:
        raise ConfigError(f"reward '{target}': {path} {no_function(name, there)}")
    registered = about["registered"]
    if registered and registered["ours"] and registered["name"] in REWARDS:
        return REWARDS.get(registered["name"])
    if about["async"]:
        raise ConfigError(f"reward '{target}' is async; write an ordinary function: {_FORMS}")
    names = [parameter["name"] for parameter in about["parameters"]]
    if not names:
        raise ConfigError(f"reward '{target}' takes no arguments; expected {_FORMS}")
    function: Any = Isolated(file, name, about, timeout_s)
    if registered:
        bounds = function.bounds if registered["has_bounds"] else None
        given = {key: registered[key] for key in ("name", "low", "high", "gold", "source")}
        return Reward(function=function, bounds=bounds, **given)
    if about["has_state"] or set(names) & set(BOUND):
        function = _imported_here(target, path, name)
    low, high = about["low"], about["high"]
    variadic = about["parameters"][0]["kind"] == inspect.Parameter.VAR_KEYWORD
    if "completions" in names or names[0] == "prompts" or variadic:
        return BatchReward(name, function, low, high)
    return Reward(name, function, low, high)


def _imported_here(target: str, path: Path, name: str) -> Callable[..., Any]:
    try:
        return getattr(import_file(path), name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"reward '{target}': {path} cannot be imported: {error!r}") from error
