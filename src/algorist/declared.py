"""Declarations of an extension: its name, its keys of the recipe, charts, rules. ``training/extension.py`` has its hooks.

The core knows none by name: it finds the folders of ``algorist.extensions``, the installed packages of the entry point group
``algorist.extensions``, and the files that a recipe names under ``plugins:``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel

from algorist.errors import ConfigError
from algorist_grader.registry import Registry

GROUP = "algorist.extensions"
"""The package whose folders are extensions, and the entry point group of installed ones."""


class Declared:
    """Properties of an extension without a run."""

    name: ClassVar[str]
    """Its folder, and the prefix of its metrics."""
    keys: ClassVar[Mapping[str, type[BaseModel]]] = {}
    """Section of the recipe (``""`` the recipe itself, ``grpo``, ``model``, …) → a ``Section`` whose fields are added to it."""
    order: ClassVar[int] = 50
    """Place among the hooks of others; a smaller number comes first."""
    charts: ClassVar[Sequence[tuple[Any, ...]]] = ()
    """Of its metrics in the report: title, what a healthy curve looks like, patterns of names, and more of ``report/curves.py: Chart``."""
    rules: ClassVar[Sequence[Any]] = ()
    """Rules that ``preflight``, ``diagnose`` and the warnings of a running training apply to it."""

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe

    @classmethod
    def takes_part(cls, recipe: Any) -> bool:
        """Whether the recipe asks for it: one of its keys differs from the default."""
        for section, keys in cls.keys.items():
            values = getattr(recipe, section) if section else recipe
            if any(getattr(values, key) != default for key, default in _defaults(keys)):
                return True
        return not cls.keys


E = TypeVar("E", bound=type[Declared])
EXTENSIONS: Registry[type[Declared]] = Registry("extension")
_OWNERS: dict[tuple[str, str], str] = {}
"""Section and key → name of the extension that adds it."""
_SECTIONS: dict[str, list[type[BaseModel]]] = {}


def extension(cls: E) -> E:
    """Register an extension; its keys become keys of the recipe.

    Raises:
        ConfigError: The name, or one of its keys, is there already.
    """
    if _SECTIONS:
        _check_keys(cls)
    EXTENSIONS.register(cls.name)(cls)
    if _SECTIONS:
        _add_keys(cls)
    return cls


def registered() -> list[type[Declared]]:
    """Return all extensions in the order of their hooks."""
    return sorted((EXTENSIONS.get(name) for name in EXTENSIONS), key=lambda cls: cls.order)


def open_schema(recipe: type[BaseModel], **sections: type[BaseModel]) -> None:
    """Find the extensions, and add their keys to the recipe and its sections (config/schema.py calls this once)."""
    package = importlib.import_module(GROUP)
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    for name in names:
        try:
            importlib.import_module(f"{GROUP}.{name}")
        except ModuleNotFoundError as error:  # built on a folder that was deleted: it goes with it
            missing = (error.name or "").removeprefix(f"{GROUP}.").partition(".")[0]
            if missing in names or not str(error.name).startswith(f"{GROUP}."):
                raise
    for point in entry_points(group=GROUP):
        point.load()
    _SECTIONS.update({"": [recipe], **{name: [section, recipe] for name, section in sections.items()}})
    for cls in registered():
        _check_keys(cls)
        _add_keys(cls)


def _check_keys(cls: type[Declared]) -> None:
    for name, keys in cls.keys.items():
        if name not in _SECTIONS:
            raise ConfigError(
                f"extension '{cls.name}' adds keys to '{name}'; expected one of {', '.join(filter(None, _SECTIONS))}, or an empty text "
                "for the recipe itself"
            )
        for key in keys.model_fields:
            if key in _SECTIONS[name][0].model_fields and _OWNERS.get((name, key)) != cls.name:
                raise ConfigError(
                    f"extension '{cls.name}' adds the key {name}.{key}, which is there already; choose another name"
                )


def _add_keys(cls: type[Declared]) -> None:
    for name, keys in cls.keys.items():
        section = _SECTIONS[name][0]
        for key, info in keys.model_fields.items():
            _OWNERS[name, key] = cls.name
            section.__pydantic_fields__[key] = info
            section.__annotations__[key] = info.annotation
        for model in _SECTIONS[name]:
            model.model_rebuild(force=True)


def keys_added_to(section: str) -> set[str]:
    """Return the keys that extensions add to a section."""
    return {key for owner, key in _OWNERS if owner == section}


def leave_out_unused(values: dict[str, Any]) -> None:
    """Take out of a recipe's values the keys of extensions that have their defaults, so that it says what it uses.

    A recipe that is stored names an extension only where it takes part, and can be read where that one is not installed.
    """
    from pydantic_core import to_jsonable_python

    for cls in registered():
        own = [
            (values[name] if name else values, key, to_jsonable_python(default))
            for name, keys in cls.keys.items()
            for key, default in _defaults(keys)
        ]
        if all(section.get(key) == default for section, key, default in own):
            for section, key, _ in own:
                section.pop(key, None)


def _defaults(keys: type[BaseModel]) -> Iterable[tuple[str, Any]]:
    return ((key, info.get_default(call_default_factory=True)) for key, info in keys.model_fields.items())
