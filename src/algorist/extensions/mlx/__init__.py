"""MLX, Apple's library of arrays, samples the rollouts by mlx-lm's models: ``grpo.engine=mlx``. The update stays torch's."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from algorist.errors import MissingExtraError
from algorist.rollouts.base import EngineSettings, RolloutEngine
from algorist.rollouts.engines import engine
from algorist.training.extension import Extension, extension

if TYPE_CHECKING:
    from algorist.config.schema import ModelSection

INSTALL = (
    "On a Mac: pip install mlx-lm; on Linux: pip install 'mlx[cpu]' mlx-lm, into an environment of its own (make test-mlx "
    "shows how). Or take the engine native"
)
"""Advice where it is missing."""


@extension
class MLX(Extension):
    name = "mlx"

    @classmethod
    def takes_part(cls, recipe: Any) -> bool:
        return cls.name in (recipe.grpo.engine, recipe.eval.engine)

    def check(self, plan: Any) -> Iterable[str]:
        key = "grpo.engine" if self.recipe.grpo.engine == self.name else "eval.engine"
        if find_spec("mlx") is None or find_spec("mlx_lm") is None:
            raise MissingExtraError(f"{key} is mlx, and mlx-lm is not installed. {INSTALL}")
        from algorist.extensions.mlx.weights import why_unknown

        if reason := why_unknown(_config_of(self.recipe.model)):
            yield f"{key} is mlx, but {reason}; take {key}=native"


def _config_of(section: ModelSection) -> dict[str, Any]:
    """Return the configuration of the recipe's model; empty where it cannot be read yet, and the engine looks again."""
    from transformers import PreTrainedConfig

    from algorist.models.load import loadable_name

    try:
        name = loadable_name(section.name, section.revision)
        return dict(PreTrainedConfig.get_config_dict(name, revision=section.revision or "main")[0])
    except Exception:  # from scratch, another format, or refused by the loader with its reason
        return {}


@engine("mlx")
def make(model: Any, tokenizer: Any, settings: EngineSettings) -> RolloutEngine:
    try:
        from algorist.extensions.mlx.engine import MLXEngine
    except ImportError as error:
        raise MissingExtraError(
            f"the engine is mlx, which cannot be imported ({error}). {INSTALL}"
        ) from error
    return MLXEngine(model, tokenizer, token_budget=settings.token_budget)
