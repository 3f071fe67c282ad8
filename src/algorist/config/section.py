"""The base of every section of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator
from pydantic_core import PydanticCustomError

MOST = 10**12
"""No setting is a larger number: neither tensors nor float32 hold what follows from one."""


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, attribute docstrings become descriptions."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    @field_validator("*")
    @classmethod
    def _usable(cls, value: Any) -> Any:
        for part in _parts(value):
            if isinstance(part, str) and "\0" in part:
                raise PydanticCustomError(
                    "unusable", "holds a NUL character, which no name of a file may have; take it out"
                )
            if isinstance(part, int | float) and not abs(part) <= MOST:
                raise PydanticCustomError("unusable", f"expected a number of at most {MOST:.0e}")
        return value


def _parts(value: Any) -> Iterator[Any]:
    """Yield the texts and numbers in lists and mappings."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value
