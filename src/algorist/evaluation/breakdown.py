"""The same metrics for each subject, level or dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from algorist.errors import DataError, nearest
from algorist.evaluation.estimators import Interval, summarise

GROUPINGS = ("subject", "level", "dataset", "reason")


def breakdown(
    samples: Sequence[Mapping[str, Any]], by: str, ks: Sequence[int] = (1, 4, 8)
) -> dict[str, dict[str, Interval]]:
    """Return ``summarise`` for each value of the column ``by``, sorted, numbers by size.

    Rows without a value stand under ``(none)``.

    Raises:
        DataError: ``by`` is not one of ``GROUPINGS`` or no row has it.
    """
    if by not in GROUPINGS:
        raise DataError(f"cannot break down by '{by}'.{nearest(by, GROUPINGS)} Known: {', '.join(GROUPINGS)}")
    if samples and not any(by in row for row in samples):
        raise DataError(f"the samples have no column '{by}'; evaluate again with a dataset that tells it")
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in samples:
        value = row.get(by)
        groups.setdefault("(none)" if value in (None, "") else str(value), []).append(row)
    return {name: summarise(groups[name], ks) for name in sorted(groups, key=_order)}


def _order(name: str) -> tuple[bool, float, str]:
    digits = "".join(c for c in name if c.isdigit())
    return (name == "(none)", float(digits) if digits else 0.0, name)
