"""Tables of pass rates: how often a model solved each problem. ``algorist data rate`` writes them, ``pass_rate`` filters by them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from algorist.errors import DAMAGED, DataError
from algorist.types import Problem

log = logging.getLogger("algorist.data")


def key_of(problem: Problem) -> str:
    """Return what a problem is known by in a table: its question and gold answer, not its id."""
    return hashlib.sha256(f"{problem.question}\0{problem.answer}".encode()).hexdigest()[:16]


def read_table(path: Path) -> dict[str, Any]:
    """Return a table: ``model``, ``samples``, and ``problems``, key → ``id`` and ``right``, the samples that were right.

    Raises:
        DataError: It is missing or not such a table.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["samples"] < 1 or not all("right" in entry for entry in table["problems"].values()):
            raise KeyError("right")
    except OSError as error:
        raise DataError(
            f"no table of pass rates at {path} ({error.strerror}); make one: algorist data rate RECIPE"
        ) from None
    except DAMAGED:
        raise DataError(
            f"{path} is no table of pass rates; expected what algorist data rate writes: samples, and right for each problem"
        ) from None
    return dict(table)


def within(
    problems: Sequence[Problem], bounds: Sequence[float], table: Mapping[str, Any], name: str
) -> list[Problem]:
    """Return the problems whose pass rate lies within ``bounds``, both included; those without one are left out and counted.

    Raises:
        DataError: None is left.
    """
    rates = [
        entry["right"] / table["samples"] if (entry := table["problems"].get(key_of(p))) else None
        for p in problems
    ]
    kept = [
        p
        for p, rate in zip(problems, rates, strict=True)
        if rate is not None and bounds[0] <= rate <= bounds[1]
    ]
    known = [rate for rate in rates if rate is not None]
    told = (
        f"pass_rate: {len(kept)} of {len(problems)} problems of '{name}' lie within {bounds[0]:g} and {bounds[1]:g}; "
        f"{sum(r < bounds[0] for r in known)} are harder, {sum(r > bounds[1] for r in known)} easier, "
        f"{len(problems) - len(known)} have no rate"
    )
    if not kept:
        raise DataError(
            f"{told}. Widen data.train.pass_rate, or rate this dataset: algorist data rate RECIPE"
        )
    log.info("%s", told)
    return kept
