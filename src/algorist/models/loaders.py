"""The door of model loading: what else ``model.name`` may be, and how else weights are loaded. ``@loader("name")`` registers a ``Loader``.

Light: what a loader needs is imported when it loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from algorist.errors import ConfigError, check_known
from algorist_grader.registry import Registry

if TYPE_CHECKING:
    import torch

    from algorist.config.section import ModelSection


class Loader:
    """One way to load models. Every method may be left out; the keys that it reads are those of an extension."""

    aliases: ClassVar[Mapping[str, str]] = {}
    """Names of its own → the models' names on the hub."""
    smaller: ClassVar[Mapping[str, Any]] = {}
    """Keys of the model section that make an adapter's base take less memory."""
    everywhere: ClassVar[Sequence[str]] = ()
    """Keys that hold for every model of a run; the others say how an adapter's base, or a model by its name, is loaded."""

    def place(self, name: str, revision: str | None) -> str | None:
        """Return the folder or hub name that transformers loads for ``model.name``; None for a name that is not its own."""
        return None

    def advice(self, name: str) -> str:
        """Advise on a name that cannot be loaded; empty for a name that is not its own."""
        return ""

    def check(self, section: ModelSection, device: torch.device) -> None:
        """Refuse a section that it cannot load, before anything is loaded (ConfigError, MissingExtraError)."""

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

    def loaded(self, model: Any, section: ModelSection) -> None:
        """Take a model of transformers that is where it will run, before it gets an adapter."""


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
    """Return the name that transformers loads for ``model.name``: a loader's, else the name as it is.

    Raises:
        AlgoristError: The name is a loader's, which cannot read the model.
    """
    places = (one.place(name, revision) for one in loaders())
    return next((place for place in places if place is not None), name)


def hub_name(name: str) -> str:
    """Return the name on the hub of a model that a recipe names otherwise."""
    return next((one.aliases[name] for one in loaders() if name in one.aliases), name)


# ---- what differs between model families: where LoRA adapters go. One entry per family that is not Llama-like

LLAMA_LIKE = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
}
FAMILIES: dict[str, dict[str, list[str]]] = {
    "gpt2": {"attention": ["c_attn"], "mlp": ["c_fc"]},
    "phi3": {"attention": ["qkv_proj", "o_proj"], "mlp": ["gate_up_proj", "down_proj"]},
    "gpt_neox": {"attention": ["query_key_value", "dense"], "mlp": ["dense_h_to_4h", "dense_4h_to_h"]},
}


def lora_targets(model: Any, modules: str | list[str]) -> str | list[str]:
    """Return PEFT's target modules for ``attention``, ``attention+mlp``, ``all-linear`` or a list of names.

    Raises:
        ConfigError: None of the names exists in the model, or one of a list does not.
    """
    if modules == "all-linear":
        return modules
    family = FAMILIES.get(model.config.model_type, LLAMA_LIKE)
    names = modules if isinstance(modules, list) else [n for part in modules.split("+") for n in family[part]]
    own = [f".{name}" for name, _ in model.named_modules()]
    targets = [n for n in names if any(name.endswith(f".{n}") for name in own)]  # as PEFT takes them
    if isinstance(modules, list) and (missing := [n for n in names if n not in targets]):
        known = {
            n.rpartition(".")[2]
            for n, m in model.named_modules()
            if getattr(getattr(m, "weight", None), "ndim", 0) == 2
        }
        what = f"model.lora.target_modules: the model ({model.config.model_type}) has no module"
        check_known(missing[0], sorted(known), f"{what} '{missing[0]}'", "It has {}; all of them: all-linear")
    if not targets:
        raise ConfigError(
            f"model.lora.target_modules {names}: the model ({model.config.model_type}) has none of these modules; "
            "take all-linear"
        )
    return targets
