"""Dataset adapters: named functions from a source (hub name or local path) to problems."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from algorist.config.schema import DatasetSection
from algorist.errors import DataError, check_known, nearest
from algorist.types import Problem
from algorist_grader.registry import Registry

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a dataset's rows.

    ``path`` (a file or folder) wins over ``hub`` (``owner/name``). ``columns`` maps our names (question, answer,
    solution, subject, level, id) to the columns of the file. ``params`` are adapter-specific.
    """

    split: str = "train"
    path: str | None = None
    hub: str | None = None
    subset: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)


Adapter = Callable[[Source], list[Problem]]
DATASETS: Registry[Adapter] = Registry(
    "dataset", [f"algorist.data.{name}" for name in ("adapters", "rollouts")]
)
dataset = DATASETS.register


def read_params(values: Mapping[str, Any], model: type[M], where: str) -> M:
    """Return the params of a dataset, checked.

    Raises:
        DataError: An unknown key, or a value that does not fit.
    """
    refuse_unknown(values, model.model_fields, where)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        wrong = error.errors()[0]
        key: Any = wrong["loc"][0]
        info, value = model.model_fields[key], values.get(key)
        valid, usual = get_args(info.annotation), info.default
        hint = nearest(str(value), valid) if isinstance(usual, str) else ""
        hint = hint or ("" if usual is None or info.is_required() else f", such as {usual!r}")
        raise DataError(f"{where}: data.….params.{key} is {value!r}. {wrong['msg']}{hint}") from None


def refuse_unknown(params: Iterable[str], valid: Collection[str], where: str) -> None:
    """Raise DataError for the first key of ``params`` that is not among ``valid``."""
    for key in params:
        beside = f"; data.….{key} is beside params" if key in DatasetSection.model_fields else ""
        check_known(key, valid, f"{where}: data.….params has the key '{key}'{beside}", kind=DataError)


def id_of(question: str) -> str:
    """Return the id of a problem whose rows name none: 12 hexadecimal digits of its question's hash."""
    return hashlib.sha256(question.encode()).hexdigest()[:12]
