"""Dataset adapters: named functions from a source (hub name or local path) to problems."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, Field, ValidationError, create_model

from algorist.config.schema import DatasetSection
from algorist.errors import DataError, check_known, nearest
from algorist.types import Problem
from algorist_grader.registry import Registry

P = ParamSpec("P")
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
Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Split = Literal["train", "test"]


def generated(
    name: str, instead: str = "name=local for rows of your own"
) -> Callable[[Callable[P, list[Problem]]], Callable[P, list[Problem]]]:
    """Return a decorator for a function that makes problems: its keyword arguments are the dataset's params, checked by their types.

    Args:
        name: Of the dataset.
        instead: What to take for problems that exist already.
    """

    def decorate(make: Callable[P, list[Problem]]) -> Callable[P, list[Problem]]:
        form, hints = signature(make), get_type_hints(make, include_extras=True)
        fields: dict[str, Any] = {key: (hints[key], value.default) for key, value in form.parameters.items()}
        model = create_model(name, **fields)

        @wraps(make)
        def checked(*args: P.args, **values: P.kwargs) -> list[Problem]:
            return make(**dict(read_params(form.bind(*args, **values).arguments, model, name)))  # type: ignore[call-arg]

        @wraps(make)
        def load(source: Source) -> list[Problem]:
            if source.path is not None or source.hub is not None:
                raise DataError(
                    f"{name} makes its problems and reads nothing, but data.….path or hub is set; take {instead}"
                )
            if source.split not in get_args(Split):
                raise DataError(f"{name} has no split '{source.split}'; expected 'train' or 'test'")
            refuse_unknown(source.params, [key for key in fields if key != "split"], name)
            return checked(**source.params, split=source.split)  # type: ignore[arg-type, call-arg]

        dataset(name)(load)
        return checked

    return decorate


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


def draw_distinct(
    draw: Callable[[], Problem | None], count: int, name: str, advice: str, most_misses: int = 20_000
) -> list[Problem]:
    """Return ``count`` problems with different texts out of what ``draw`` makes; None is a draw without a problem.

    Raises:
        DataError: The last ``most_misses`` draws made no new problem: there are no more; ``advice`` says what else to change.
    """
    problems: dict[str, Problem] = {}
    misses = 0
    while len(problems) < count:
        problem, misses = draw(), misses + 1
        if problem is not None and problem.question not in problems:
            problems[problem.question], misses = problem, 0
        if misses == most_misses:
            raise DataError(
                f"{name} made only {len(problems)} distinct problems of {count}; ask for fewer{advice}"
            )
    return list(problems.values())


def refuse_unknown(params: Iterable[str], valid: Collection[str], where: str) -> None:
    """Raise DataError for the first key of ``params`` that is not among ``valid``."""
    for key in params:
        beside = f"; data.….{key} is beside params" if key in DatasetSection.model_fields else ""
        check_known(key, valid, f"{where}: data.….params has the key '{key}'{beside}", kind=DataError)


def id_of(question: str) -> str:
    """Return the id of a problem whose rows name none: 12 hexadecimal digits of its question's hash."""
    return hashlib.sha256(question.encode()).hexdigest()[:12]


def is_held_out(text: str, one_in: int = 10) -> bool:
    """Return whether a hash puts ``text`` into the test split, as it does one text in ``one_in``."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % one_in == 0
