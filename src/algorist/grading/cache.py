"""A cache bounded by bytes: two generations of a dictionary, the older one is dropped when the younger one is full."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")
_ENTRY = 400
"""Bytes of one entry beside its texts: key tuple, value, place in the dictionary."""


class ByteCache(Generic[Value]):
    """What was asked lately, at most ``limit`` bytes of it. Every operation is one step of a dictionary: threads may share it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._young: dict[Hashable, Value] = {}
        self._old: dict[Hashable, Value] = {}
        self._bytes = 0

    def get(self, key: Hashable) -> Value | None:
        """Return what was kept, or None."""
        value = self._young.get(key)
        return value if value is not None else self._old.get(key)

    def put(self, key: Hashable, value: Value, *texts: str) -> None:
        """Keep a value whose key holds these texts; an entry of more than a hundredth of the limit is not kept."""
        size = _ENTRY + sum(map(sys.getsizeof, texts))
        if size * 100 > self.limit:
            return
        if self._bytes + size > self.limit // 2:
            self._old, self._young, self._bytes = self._young, {}, 0
        self._young[key] = value
        self._bytes += size

    def clear(self) -> None:
        """Forget everything."""
        self._young, self._old, self._bytes = {}, {}, 0

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())
