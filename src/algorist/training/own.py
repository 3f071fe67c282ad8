"""Losses and advantages by name, or a user's own: ``file.py:function``."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from algorist.errors import ConfigError, nearest
from algorist.objectives import ADVANTAGES, LOSSES, Loss
from algorist.objectives.advantages import Advantage
from algorist.objectives.losses import loss_named


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
    """Import ``file.py:function``; a file that was imported before is not run again."""
    file, _, name = target.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(
            f"{key}={target}: there is no file {path}.{nearest(path.name, beside)} Write file.py:function with a path from "
            f"{Path.cwd()}"
        )
    module_name = f"algorist_own_{path.stem}_{abs(hash((path, path.stat().st_mtime_ns))):x}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None  # the name ends in .py
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[module_name]
            raise ConfigError(f"{key}={target}: {path} cannot be imported: {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module_name]
        raise ConfigError(
            f"{key}={target}: {path} has no function '{name}'.{nearest(name, there)} There are: {', '.join(there) or 'none'}"
        )
    return function  # type: ignore[no-any-return]
