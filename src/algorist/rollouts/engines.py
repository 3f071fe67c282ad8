"""Engines by name: ``@engine("name")`` registers one, ``make_engine`` makes it, ``auto_engine`` asks which wants the job.

Light: what an engine needs is imported when one is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from algorist.errors import EngineError
from algorist.rollouts.base import EngineSettings, RolloutEngine
from algorist_grader.registry import Registry

if TYPE_CHECKING:
    from algorist.config.schema import GRPOSection

log = logging.getLogger("algorist.rollouts.engines")


@dataclass(frozen=True)
class EngineKind:
    """Constructor and properties of a registered engine.

    Attributes:
        make: Called with model, tokenizer and ``EngineSettings``.
        claims: Whether ``auto`` on a GPU takes it for (model, completions at a time), and in a few words why or why not.
        own_device: It samples where it runs, not where the model lies; the main process alone evaluates with it.
        exact: Its log-probs are the trainer's but for rounding; else they may be corrected for.
        advice: Lines ``grpo.KEY=VALUE (why)`` for a ``grpo`` section that leave the update more memory.
    """

    make: Callable[[Any, Any, EngineSettings], RolloutEngine]
    claims: Callable[[Any, int], tuple[bool, str]] | None = None
    own_device: bool = False
    exact: bool = True
    advice: Callable[[GRPOSection], list[str]] = lambda _: []


ENGINES: Registry[EngineKind] = Registry("rollout engine")
F = TypeVar("F", bound=Callable[..., Any])


def engine(name: str, **kind: Any) -> Callable[[F], F]:
    """Return a decorator that registers a function of (model, tokenizer, settings) under ``name``.

    ``kind`` are the other attributes of ``EngineKind``. ``grpo.engine`` and ``eval.engine`` then take the name.
    """

    def decorate(make: F) -> F:
        ENGINES.register(name)(EngineKind(make, **kind))
        return make

    return decorate


@engine("auto")
@engine("native")
def _native(model: Any, tokenizer: Any, settings: EngineSettings) -> RolloutEngine:
    from algorist.rollouts.native.engine import NativeEngine
    from algorist.rollouts.native.module_tier import why_no_module_tier
    from algorist.rollouts.native.weights import why_no_decoder

    reason = why_no_module_tier(model)
    if reason and why_no_decoder(model):
        log.warning("rollouts of %s go through model.generate: %s", type(model).__name__, reason)
        return _transformers(model, tokenizer, settings)
    return NativeEngine(model, tokenizer, token_budget=settings.token_budget)


@engine("transformers")
def _transformers(model: Any, tokenizer: Any, settings: EngineSettings) -> RolloutEngine:
    from algorist.rollouts.transformers import TransformersEngine

    return TransformersEngine(model, tokenizer, token_budget=settings.token_budget)


def is_exact(engine: RolloutEngine) -> bool:
    """Whether the log-probs of an engine are the trainer's but for rounding; so are those of an engine without a registered name."""
    return engine.name not in ENGINES or ENGINES.get(engine.name).exact


def make_engine(
    name: str,
    model: Any,
    tokenizer: Any = None,
    *,
    token_budget: int | None = None,
    section: GRPOSection | None = None,
    together: bool = False,
) -> RolloutEngine:
    """Return the engine called ``name`` for ``model``.

    Args:
        name: ``auto`` and ``native`` take the native engine where it can run the model and fall back to ``transformers``
            with one log line that says why (``auto_engine`` decides before whether it is another); ``transformers`` always
            takes ``model.generate``; or a name that an extension or a plug-in registers.
        model: A causal language model of transformers or PEFT.
        tokenizer: Gives end and pad tokens; stop strings need it.
        token_budget: See ``EngineSettings``.
        section: The same.
        together: The same.

    Raises:
        ConfigError: Unknown name.
        EngineError: The engine cannot run the model.
        MissingExtraError: What it needs is not installed.
    """
    made = ENGINES.get(name).make(model, tokenizer, EngineSettings(token_budget, section, together))
    if not hasattr(made, "generate") or not isinstance(getattr(made, "name", None), str):
        raise EngineError(
            f"engine '{name}': its function returned {type(made).__name__}; expected an object with name and generate()"
        )
    return made


def decodes_natively(model: Any) -> bool:
    """Return whether the native engine has a decoder for a model, which reads weights that are whole."""
    from algorist.rollouts.native.weights import why_no_decoder

    return why_no_decoder(model) is None


def auto_engine(name: str, model: Any, rows: int) -> tuple[str, str]:
    """Return the engine to make for ``name``, and on a GPU one line that says what ``auto`` takes and why.

    Args:
        name: As for ``make_engine``; anything but ``auto`` comes back as it is, without a line.
        model: The policy.
        rows: Completions sampled at a time.
    """
    from algorist.models.precision import on_gpu
    from algorist.rollouts.native.engine import NativeEngine

    device = model.get_input_embeddings().weight.device
    if name != "auto" or not on_gpu(device):
        return name, ""
    refusals = []
    for other in ENGINES:
        claims = ENGINES.get(other).claims
        takes, why = claims(model, rows) if claims else (False, "")
        if takes:
            return other, f"rollouts: {why} (grpo.engine=native takes CUDA graphs instead)"
        refusals += [why] if why else []
    return "auto", "; ".join([f"rollouts: {NativeEngine.on_gpu_by(model, device)}", *refusals])
