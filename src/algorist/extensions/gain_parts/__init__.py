"""Parts of a gain by reason: format, length, extraction, arithmetic, operations (``algorist compare --parts``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from algorist.evaluation.doors import GainPart, breakdown


@breakdown("parts")
def _parts(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> dict[str, GainPart]:
    from algorist.extensions.gain_parts.parts import parts_of

    return parts_of(before, after)
