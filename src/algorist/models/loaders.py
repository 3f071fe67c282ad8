"""The door of model loading: what else ``model.name`` may be, and how else weights are loaded. ``@loader("name")`` registers a ``Loader``.

Light: what a loader needs is imported when it loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from algorist.registry import Registry

if TYPE_CHECKING:
    import torch

    from algorist.config.model_section import ModelSection


class Loader:
    """One way to load models. Every method may be left out; the keys that it reads are those of an extension."""

    aliases: ClassVar[Mapping[str, str]] = {}
    """Names of its own → the models' names on the hub."""
    smaller: ClassVar[Mapping[str, Any]] = {}
    """Keys of the model section that make an adapter's base take less memory."""

    def place(self, name: str, revision: str | None) -> str | None:
        """Return the folder or hub name that transformers loads for ``model.name``; None for a name that is not its own."""
        return None

    def advice(self, name: str) -> str:
        """Return what to do where a name cannot be loaded; empty for a name that is not its own."""
        return ""

    def check(self, section: ModelSection, device: torch.device) -> None:
        """Refuse what it cannot load, before anything is loaded (ConfigError, MissingExtraError)."""

    def takes(self, section: ModelSection) -> bool:
        """Whether it makes the model, with its adapter, in place of transformers."""
        return False

    def make(
        self, section: ModelSection, device: torch.device, dtype: torch.dtype, *, seed: int, longest: int
    ) -> Any:
        """Return the model that it takes; ``longest`` is the most tokens of a prompt with its completion."""
        raise NotImplementedError

    def arguments(
        self, section: ModelSection, device: torch.device, compute: torch.dtype
    ) -> Mapping[str, Any]:
        """Return more arguments of transformers' ``from_pretrained``."""
        return {}

    def loaded(self, model: Any) -> None:
        """Take a model that transformers has loaded."""


LOADERS: Registry[Loader] = Registry("model loader")
L = TypeVar("L", bound=type[Loader])


def loader(name: str) -> Callable[[L], L]:
    """Return a decorator that registers a ``Loader``."""

    def decorate(cls: L) -> L:
        LOADERS.register(name)(cls())
        return cls

    return decorate


def loaders() -> list[Loader]:
    """Return all loaders."""
    return [LOADERS.get(name) for name in LOADERS]


def own_loader(section: ModelSection) -> Loader | None:
    """Return the loader that makes the model in place of transformers, if one does."""
    return next((one for one in loaders() if one.takes(section)), None)


def loadable_name(name: str, revision: str | None = None) -> str:
    """Return what transformers loads for ``model.name``: what a loader says, else the name as it is.

    Raises:
        AlgoristError: The name is a loader's, which cannot read what it names.
    """
    places = (one.place(name, revision) for one in loaders())
    return next((place for place in places if place is not None), name)


def hub_name(name: str) -> str:
    """Return the name on the hub of a model that a recipe names otherwise."""
    return next((one.aliases[name] for one in loaders() if name in one.aliases), name)
