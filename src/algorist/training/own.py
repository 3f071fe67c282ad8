"""Losses and advantages by name, or a user's own: ``file.py:function``."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from algorist.errors import ConfigError
from algorist.objectives import ADVANTAGES, LOSSES, Loss
from algorist.objectives.advantages import Advantage
from algorist.objectives.losses import loss_named
from algorist.user_file import find_file, functions_of, import_file, no_function


def find_loss(name: str) -> Loss:
    """Return the loss called ``name``, or that of ``file.py:function``; without ``@loss`` its reduction is ``token-mean``."""
    if ".py:" not in name:
        return LOSSES.get(name)
    function = _load(name, "grpo.loss")
    declared = loss_named(function)
    return replace(declared, name=name, function=_in_words(name, function), prefix="loss/")


def find_advantage(name: str) -> Advantage:
    """Return the advantage called ``name``, or that of ``file.py:function``."""
    if ".py:" not in name:
        return ADVANTAGES.get(name)
    function = _load(name, "grpo.advantage")
    parameters = list(inspect.signature(function).parameters.values())
    needed = [p.name for p in parameters[1:] if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    single = [p.name for p in parameters if p.name in ("components_PGK", "weights_K")]
    if not parameters or set(needed) - set(single) or len(single) == 1:
        raise ConfigError(
            f"grpo.advantage={name} takes ({', '.join(p.name for p in parameters)}); expected one argument, the rewards (P, G), and "
            "default values for any other; or rewards, components_PGK and weights_K: the single rewards (P, G, K) and their weights"
        )
    return _in_words(name, function)


def _in_words(target: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its exceptions as a user's mistake: what was raised, and in which line."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError(
                f"{target} raised {type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}: {error}"
            ) from error

    return called


def _load(target: str, key: str) -> Callable[..., Any]:
    path, name = find_file(target, f"{key}={target}")
    try:
        module = import_file(path)
    except Exception as error:
        raise ConfigError(f"{key}={target}: {path} cannot be imported: {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{key}={target}: {path} {no_function(name, functions_of(module))}")
    return function  # type: ignore[no-any-return]
