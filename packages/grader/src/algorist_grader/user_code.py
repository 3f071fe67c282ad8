"""A user's own function, named as ``file.py:function``: found and imported in one way wherever one may be named."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from algorist_grader.errors import ConfigError, nearest
from algorist_grader.registry import by_user

_times = itertools.count()
_INSTALLED = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))


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


def run_again(path: Path) -> None:
    """Import a file; one that was imported before runs again in its own place, because others may have replaced what it registered."""
    known = {*sys.modules}
    if (module := import_file(path)).__name__ in known:
        del sys.modules[module.__name__]
        import_file(path)


def own_line(error: BaseException, places: Iterable[tuple[str, int]] = (), otherwise: str = "") -> str:
    """Return ``file.py:line`` of the last place of a traceback in a user's own file; where none is, ``otherwise`` or the last place.

    Args:
        error: What was raised.
        places: File and line of each frame, where its traceback is known as text only.
        otherwise: What to return where no place is in a user's own file.
    """
    frames = [*places] or [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
    ours = (
        *_INSTALLED,
        *(
            str(Path(m.__file__ or "").parent)
            for m in map(sys.modules.get, ("algorist", "algorist_grader"))
            if m
        ),
    )
    own = [
        frame for frame in frames if not frame[0].startswith(("<", *(f"{folder}{os.sep}" for folder in ours)))
    ]
    last = (own or ([] if otherwise else frames))[-1:]
    return "".join(f"{Path(file).name}:{line}" for file, line in last) or otherwise


def functions_of(module: ModuleType) -> list[str]:
    """Return the names of the functions that a module defines itself."""
    return [k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]


def no_function(name: str, names: list[str]) -> str:
    """Report that a file lacks a function, and list those that it has."""
    return f"has no function '{name}'.{nearest(name, names)} There are: {', '.join(names) or 'none'}"
