"""Parameters of a registered function: names, defaults, types and meanings come from its signature and docstring alone."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from algorist.errors import ConfigError, check_known

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Parameter:
    """One parameter: its default (``REQUIRED`` without one), its type, and what its docstring says."""

    name: str
    default: Any
    kind: Any
    meaning: str = ""

    def checked(self, value: Any) -> Any:
        """Return the value as the type of the parameter; a number may be written as text (``1e-3``).

        Raises:
            ValueError: It is of another type, or out of bounds.
        """
        from pydantic import ConfigDict, TypeAdapter, ValidationError

        try:
            return TypeAdapter(self.kind, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
        except ValidationError as error:
            said = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(f"{said[0].lower()}{said[1:]} (got {value!r:.80})") from None


def parameters_of(function: Callable[..., Any], without: Iterable[str] = ()) -> dict[str, Parameter]:
    """Return a function's settable parameters, by name; ``without`` are the arguments that its caller fills in."""
    meanings = meanings_of(inspect.getdoc(function) or "")
    return {
        p.name: Parameter(p.name, p.default, _kind(p, function), meanings.get(p.name, ""))
        for p in inspect.signature(function).parameters.values()
        if p.name not in without and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }


def check_values(
    parameters: Mapping[str, Parameter], values: Mapping[str, Any], *, of: str, key: str
) -> dict[str, Any]:
    """Return the values as the types of the parameters.

    Args:
        parameters: What can be set.
        values: What is set.
        of: Whose they are, for messages: "the loss 'cispo'".
        key: Where they are set: "grpo.loss".

    Raises:
        ConfigError: A parameter that is not there (the nearest one and all are named), or a value of another type.
    """
    checked = {}
    for name, value in values.items():
        check_known(name, parameters, f"{key}.{name}: {of} has no parameter '{name}'", "It has: {}")
        try:
            checked[name] = parameters[name].checked(value)
        except ValueError as error:
            raise ConfigError(f"{key}.{name}, a parameter of {of}: {error}") from None
    return checked


def _kind(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    """Return the annotated type, else that of a plain default, else anything."""
    default = parameter.default
    kind = type(default) if isinstance(default, (bool, int, float, str)) else Any
    if parameter.annotation is not parameter.empty:
        holder = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
        names = getattr(inspect.unwrap(function), "__globals__", {})
        try:
            kind = typing.get_type_hints(holder, names, include_extras=True)[parameter.name]
        except Exception:  # a name that exists for type checkers only
            return kind
    return float if kind is int and parameter.annotation is parameter.empty else kind


def meanings_of(doc: str) -> dict[str, str]:
    """Return the meaning of each parameter from the ``Args:`` of a docstring, on one line."""
    listed = re.search(r"^Args:\n((?:[ \n].*\n?)+)", doc, re.MULTILINE)
    pairs = re.findall(r"^    (\w+): ((?:.+\n?(?:     +.+\n?)*))", listed[1], re.MULTILINE) if listed else []
    return {name: " ".join(text.replace("``", "`").split()) for name, text in pairs}
