"""Names for plain functions and classes: ``Registry("reward")`` makes one decorator and one lookup."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Generic, TypeVar

from algorist_grader.errors import ConfigError, check_known

T = TypeVar("T")
F = TypeVar("F")


_BY_USER: ContextVar[bool] = ContextVar("by_user", default=False)


_ADDED: dict[str, list[str]] = {}
"""Kind → modules that ``add_module`` added."""


def add_module(module: str, *kinds: str) -> None:
    """Add a module that registers entries of these kinds, to be imported when one of them is looked up."""
    for kind in kinds:
        _ADDED.setdefault(kind, []).append(module)


@contextmanager
def by_user() -> Iterator[None]:
    """Register the entries inside as a user's, which may be registered again: a file that was edited, or a run's copy of it."""
    token = _BY_USER.set(True)
    try:
        yield
    finally:
        _BY_USER.reset(token)


def _being_imported(module: str) -> bool:
    """Tell whether a module's import has begun and not ended."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


class Registry(Generic[T]):
    """Maps names to objects; duplicate names fail at registration, unknown names answer with the nearest one.

    Args:
        kind: What they are, for messages.
        members: Modules that register some; imported when something is first looked up or added.
    """

    def __init__(self, kind: str, members: Sequence[str] = ()) -> None:
        self.kind = kind
        self._members = list(members)
        self._entries: dict[str, T] = {}
        self._by_user: set[str] = set()

    def register(self, name: str) -> Callable[[F], F]:
        """Return a decorator that stores the object under ``name`` and returns it unchanged."""

        def decorate(entry: F) -> F:
            # A member that is imported by its own name registers itself before the others are asked.
            if not any(map(_being_imported, self._members)):
                self._open()
            if name in self._entries and not (_BY_USER.get() and name in self._by_user):
                raise ConfigError(f"{self.kind} '{name}' is registered twice; choose another name")
            self._entries[name] = entry  # type: ignore[assignment]
            if _BY_USER.get():
                self._by_user.add(name)
            return entry

        return decorate

    def _open(self) -> None:
        """Import the modules that register the members, when something is first asked of them or added to them."""
        token = _BY_USER.set(False)
        try:
            while self._members:
                import_module(self._members.pop(0))
        finally:
            _BY_USER.reset(token)

    def _look_up(self) -> None:
        """Import what registers members, and what ``add_module`` added, which may need the room of the registry to be complete."""
        self._members += _ADDED.pop(self.kind, [])
        self._open()

    def get(self, name: str) -> T:
        """Return the entry called ``name``.

        Raises:
            ConfigError: No such entry; the message names the nearest one and lists all.
        """
        check_known(name, self.names(), f"unknown {self.kind} '{name}'", "Known: {}")
        return self._entries[name]

    def names(self) -> list[str]:
        """Return all names, sorted."""
        self._look_up()
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        self._look_up()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
