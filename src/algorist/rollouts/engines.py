"""Choosing the engine by name, with a stated fallback."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from algorist.errors import EngineError, nearest
from algorist.models.precision import on_gpu
from algorist.rollouts.base import RolloutEngine

log = logging.getLogger("algorist.rollouts")
ENGINES = ("auto", "native", "transformers", "vllm")


def make_engine(
    name: str,
    model: Any,
    tokenizer: Any = None,
    *,
    token_budget: int | None = None,
    vllm: Mapping[str, Any] | None = None,
    together: bool = False,
) -> RolloutEngine:
    """Return the engine called ``name`` for ``model``.

    Args:
        name: ``auto`` and ``native`` take the native engine where it can run the model and fall back to ``transformers``
            with one log line that says why; ``auto`` on a GPU says when vLLM is there; ``transformers`` always takes ``model.generate``; ``vllm`` takes vLLM in this
            process, or the server of ``vllm["mode"] == "server"``.
        model: A causal language model of transformers or PEFT.
        tokenizer: Gives end and pad tokens; stop strings need it.
        token_budget: Most tokens in the cache at a time; vLLM has settings of its own for that.
        vllm: Settings of the vLLM engine (``grpo.vllm``); those that only the trainer reads are left out.
        together: All processes of a distributed group sample at the same time (a server gets the weights once).

    Raises:
        EngineError: Unknown name, or vLLM cannot run the model.
        MissingExtraError: ``vllm`` is not installed.
    """
    from algorist.rollouts.native.engine import NativeEngine
    from algorist.rollouts.native.module_tier import why_no_module_tier
    from algorist.rollouts.native.weights import why_no_decoder
    from algorist.rollouts.transformers import TransformersEngine

    if name not in ENGINES:
        raise EngineError(
            f"unknown rollout engine '{name}'.{nearest(name, ENGINES)} Expected one of {', '.join(ENGINES)}"
        )
    if name == "vllm":
        from algorist.rollouts.vllm.engine import SETTINGS, VLLMEngine
        from algorist.rollouts.vllm.server import SERVER_SETTINGS, VLLMServerEngine

        given = vllm or {}
        if own_server(given):
            own = {key: value for key, value in given.items() if key in SERVER_SETTINGS}
            return VLLMServerEngine(model, tokenizer, settings=own, together=together)
        own = {key: value for key, value in given.items() if key in SETTINGS}
        return VLLMEngine(model, tokenizer, settings=own)
    if name == "transformers":
        return TransformersEngine(model, tokenizer, token_budget=token_budget)
    reason = why_no_module_tier(model)
    if reason and why_no_decoder(model):
        log.warning("rollouts of %s go through model.generate: %s", type(model).__name__, reason)
        return TransformersEngine(model, tokenizer, token_budget=token_budget)
    if name == "auto" and on_gpu(model.get_input_embeddings().weight.device) and find_spec("vllm"):
        log.warning(
            "rollouts by the native engine; vLLM is installed too, and samples large batches of large models faster "
            "(from about 32 completions at a time or 3 billion weights on): grpo.engine=vllm"
        )
    return NativeEngine(model, tokenizer, token_budget=token_budget)


def own_server(vllm: Mapping[str, Any]) -> bool:
    """Whether ``grpo.vllm`` asks for a server that our engine talks to, not TRL's integration."""
    return vllm.get("mode") == "server" and vllm.get("integration") != "trl"
