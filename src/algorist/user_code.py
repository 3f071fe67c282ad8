"""A user's own function, named as ``file.py:function``: found, imported and called in one way for rewards, checkers, losses, advantages."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import itertools
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from algorist.errors import ConfigError, nearest
from algorist.registry import by_user

_times = itertools.count()


def find_file(target: str, where: str, otherwise: str = "") -> tuple[Path, str]:
    """Return the file, an absolute path, and the function's name of ``file.py:function``.

    Raises:
        ConfigError: No such file. It begins with ``where`` and ends with ``otherwise``.
    """
    file, _, name = target.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(
            f"{where}: no file at {path}.{nearest(path.name, beside)} Write file.py:function with a path from {Path.cwd()}{otherwise}"
        )
    return path, name


def import_file(path: Path, *, anew: bool = False) -> ModuleType:
    """Import a file by its path; one that has not changed since is run again only ``anew``. Raises what the file raises."""
    name = f"algorist_user_{path.stem}_{abs(hash((path, path.stat().st_mtime_ns))):x}"
    if anew:
        name += f"_{next(_times)}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling in the user's file look their module up
    try:
        with by_user():
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_function(target: str, key: str) -> Callable[..., Any]:
    """Return the function that ``key=file.py:function`` names; what it raises is a user's mistake, with the line that raised it.

    Raises:
        ConfigError: No such file or function, or the file cannot be imported.
    """
    path, name = find_file(target, f"{key}={target}")
    try:
        module = import_file(path)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}={target}: {path} cannot be imported: {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{key}={target}: {path} {no_function(name, functions_of(module))}")

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (Exception, SystemExit) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError(
                f"{target} raised {type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}: {error}"
            ) from error

    return called


def functions_of(module: ModuleType) -> list[str]:
    """Return the names of the functions that a module defines itself."""
    return [k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]


def no_function(name: str, names: list[str]) -> str:
    """Say that a file has no such function, and which it has."""
    return f"has no function '{name}'.{nearest(name, names)} There are: {', '.join(names) or 'none'}"


_PLUGINS: dict[str, str] = {}
"""Name of a file → hash of the content that was imported last."""


def load_plugins(files: Sequence[str]) -> None:
    """Import the Python files of a recipe's ``plugins``, which register what they define; again where one has changed.

    Raises:
        ConfigError: No such file, or it cannot be imported.
    """
    for file in files:
        path, _ = find_file(f"{file}:", f"plugins={file}")
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        if _PLUGINS.get(path.name) == content:
            continue
        try:
            import_file(path)
        except ConfigError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError(
                f"plugins={file}: {path.name} cannot be imported: {type(error).__name__} in {Path(frame.filename).name}:"
                f"{frame.lineno}: {error}"
            ) from error
        _PLUGINS[path.name] = content
