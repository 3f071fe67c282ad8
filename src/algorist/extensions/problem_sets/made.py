"""Datasets that are made: a function's keyword arguments are the dataset's params."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Annotated, Any, Literal, ParamSpec, get_args, get_type_hints

from pydantic import Field, create_model

from algorist.data.base import Source, dataset, read_params, refuse_unknown
from algorist.errors import DataError
from algorist.types import Problem

P = ParamSpec("P")
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


def is_held_out(text: str, one_in: int = 10) -> bool:
    """Return whether a hash puts ``text`` into the test split, as it does one text in ``one_in``."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % one_in == 0
