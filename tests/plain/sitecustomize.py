"""Python as algorist meets it on a system without fcntl, resource, fork, SIGHUP and /proc: put this folder on PYTHONPATH.

Only modules of algorist see less: what tests, torch and psutil need of Linux is there for them. ``ALGORIST_SEEN`` names a file that
gets a line for each thing that was asked for and refused.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = {"fcntl", "resource", "termios", "pty", "pwd", "grp", "ctypes"}
NAMES = {
    "os": set(
        "fork forkpty setsid killpg getpgid register_at_fork set_blocking WNOHANG sched_getaffinity getuid sync".split()
    ),
    "signal": {"SIGHUP", "SIGCHLD", "SIGKILL", "SIGALRM", "setitimer"},
    "select": {"poll", "epoll"},
}


def refuse(what: str) -> None:
    if place := os.environ.get("ALGORIST_SEEN"):
        with Path(place).open("a") as file:
            file.write(f"{what}\n")


class Less:
    """A module without some of its names."""

    def __init__(self, module: ModuleType, without: set[str]) -> None:
        self._module, self._without = module, without

    def __getattr__(self, name: str) -> Any:
        if name in self._without:
            refuse(f"{self._module.__name__}.{name}")
            raise AttributeError(f"module '{self._module.__name__}' has no attribute '{name}' (tests/plain)")
        return getattr(self._module, name)


def without(name: str, *more: Any) -> Any:
    if name in MODULES:
        refuse(name)
        raise ImportError(f"No module named '{name}' (tests/plain)")
    module = builtins.__import__(name, *more)
    return Less(module, NAMES[name]) if name in NAMES else module


def import_module(name: str, package: str | None = None) -> ModuleType:
    if name in MODULES:
        without(name)
    return importlib.import_module(name, package)


IMPORTLIB = Less(importlib, set())
IMPORTLIB.import_module = import_module  # type: ignore[attr-defined]


def imported(name: str, *more: Any) -> Any:
    return (
        IMPORTLIB
        if name == "importlib" and not (more and len(more) > 2 and more[2])
        else without(name, *more)
    )


class Finder(MetaPathFinder):
    """Has each module of algorist run with an ``import`` that knows less."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        spec = (
            importlib.machinery.PathFinder.find_spec(name, path, target)
            if name.startswith("algorist")
            else None
        )
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                module.__dict__["__builtins__"] = {**vars(builtins), "__import__": imported}
                run(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to open or list /proc for algorist; ``pathlib`` and the like do so in its name."""
    if event not in ("open", "os.listdir", "os.scandir") or not str(arguments[0]).startswith("/proc"):
        return
    frame: Any = sys._getframe(1)
    while (
        frame is not None
        and "/lib/python" in frame.f_code.co_filename
        and "site-packages" not in frame.f_code.co_filename
    ):
        frame = frame.f_back
    if frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in (
        "algorist",
        "algorist_grader",
    ):
        refuse(str(arguments[0]))
        raise FileNotFoundError(2, "No such file or directory (tests/plain)", str(arguments[0]))


sys.meta_path.insert(0, Finder())
sys.addaudithook(watch)
