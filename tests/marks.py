"""Marks that are made of values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(number: int, values: Iterable[Any], *, together: bool = False) -> list[Any]:
    """Return the values of a parameter, or of several ``together``; those after the first ``number`` are for ``make test-long``."""
    return [
        v if n < number else pytest.param(*(v if together else (v,)), marks=pytest.mark.long)
        for n, v in enumerate(values)
    ]


def but(values: Iterable[Any], *left_out: Any) -> list[Any]:
    """Return the values of a parameter; those that are named are for ``make test-long``."""
    return [pytest.param(v, marks=pytest.mark.long) if v in left_out else v for v in values]
