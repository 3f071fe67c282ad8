"""Marks that are made of values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(number: int, values: Iterable[Any]) -> list[Any]:
    """Return the values of a parameter; those after the first ``number`` are for ``make test-long``."""
    return [v if n < number else pytest.param(v, marks=pytest.mark.long) for n, v in enumerate(values)]
