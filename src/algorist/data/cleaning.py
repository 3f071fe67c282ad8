"""What adapters share when they clean gold answers, pick their own hub split and need columns."""

from __future__ import annotations

import re
from dataclasses import replace

from algorist.data.base import Source
from algorist.data.files import Row
from algorist.errors import DataError, nearest


def plain_number(value: object) -> str:
    """Return a number without a needless ``.0``, leading zeros or plus sign; any other text stripped."""
    text = "" if value is None else str(value).strip()
    match = re.fullmatch(r"\+?(-?)0*(\d+)(\.0+)?", text)
    return f"{match[1]}{match[2]}" if match else text


def without_dollars(value: object) -> str:
    """Return the text inside one pair of ``$`` around all of it; any other text stripped."""
    text = "" if value is None else str(value).strip()
    match = re.fullmatch(r"\$([^$]*[^$\\])\$", text)
    return match[1].strip() if match else text


def own_split(source: Source, split: str) -> Source:
    """Return ``source`` with the only split that the adapter's own hub dataset has; files are left as they are."""
    return source if source.path is not None or source.hub is not None else replace(source, split=split)


def require_columns(rows: list[Row], *choices: tuple[str, ...], where: str) -> None:
    """Check that the first row has at least one column of each group of alternatives.

    Raises:
        DataError: A group without any; the message names the missing field and the columns that are there.
    """
    for names in choices:
        if not any(name in rows[0] for name in names):
            raise DataError(
                f"dataset '{where}': the training dataset has no '{names[0]}' field (looked for {' or '.join(names)})."
                f"{nearest(names[0], rows[0])} Columns: {', '.join(map(str, rows[0]))}. Give a file with this column, "
                "or read yours with the adapter 'local' and data.….columns"
            )
