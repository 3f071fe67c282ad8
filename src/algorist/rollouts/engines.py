"""Choosing the engine by name, with a stated fallback."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from typing import Any

import torch

from algorist.config.vllm_sections import ColocatedVLLMSection, VLLMServerSection, own_server
from algorist.errors import EngineError, nearest
from algorist.models.precision import on_gpu
from algorist.rollouts.base import RolloutEngine

log = logging.getLogger("algorist.rollouts")
ENGINES = ("auto", "native", "transformers", "vllm")
VLLM_FROM_ROWS, VLLM_FROM_WEIGHTS = 32, 3e9
"""Where vLLM pays for waking it and giving it the weights: completions at a time, or weights (an estimate)."""


def make_engine(
    name: str,
    model: Any,
    tokenizer: Any = None,
    *,
    token_budget: int | None = None,
    vllm: ColocatedVLLMSection | VLLMServerSection | None = None,
    together: bool = False,
) -> RolloutEngine:
    """Return the engine called ``name`` for ``model``.

    Args:
        name: ``auto`` and ``native`` take the native engine where it can run the model and fall back to ``transformers``
            with one log line that says why (``auto_engine`` decides before whether it is vLLM); ``transformers`` always
            takes ``model.generate``; ``vllm`` takes vLLM in this process, or the server of a ``VLLMServerSection``.
        model: A causal language model of transformers or PEFT.
        tokenizer: Gives end and pad tokens; stop strings need it.
        token_budget: Most tokens in the cache at a time; vLLM has settings of its own for that.
        vllm: Settings of the vLLM engine (``grpo.vllm``).
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
        from algorist.rollouts.vllm.engine import VLLMEngine
        from algorist.rollouts.vllm.server import VLLMServerEngine

        if isinstance(vllm, VLLMServerSection) and own_server(vllm):
            return VLLMServerEngine(model, tokenizer, settings=vllm, together=together)
        # TRL's own integration keeps its server to itself: an evaluation then runs vLLM here.
        return VLLMEngine(model, tokenizer, settings=None if isinstance(vllm, VLLMServerSection) else vllm)
    if name == "transformers":
        return TransformersEngine(model, tokenizer, token_budget=token_budget)
    reason = why_no_module_tier(model)
    if reason and why_no_decoder(model):
        log.warning("rollouts of %s go through model.generate: %s", type(model).__name__, reason)
        return TransformersEngine(model, tokenizer, token_budget=token_budget)
    return NativeEngine(model, tokenizer, token_budget=token_budget)


def auto_engine(name: str, model: Any, rows: int) -> tuple[str, str]:
    """Return the engine to make for ``name``, and on a GPU one line that says what ``auto`` takes and why.

    vLLM decodes faster than CUDA graphs do where there is much to decode; waking it and giving it the weights has to pay.

    Args:
        name: As for ``make_engine``; anything but ``auto`` comes back as it is, without a line.
        model: The policy.
        rows: Completions sampled at a time.
    """
    from algorist.rollouts.native.engine import NativeEngine

    device = model.get_input_embeddings().weight.device
    if name != "auto" or not on_gpu(device):
        return name, ""
    no_vllm = _why_no_vllm(model, rows)
    if no_vllm is None:
        return "vllm", (
            f"rollouts: vLLM in this process, which is installed and pays for {rows} rows at a time "
            "(grpo.engine=native takes CUDA graphs instead)"
        )
    return "auto", f"rollouts: {NativeEngine.on_gpu_by(model, device)}; not vLLM: {no_vllm}"


def _why_no_vllm(model: Any, rows: int) -> str | None:
    """Return why ``auto`` leaves vLLM out, or None."""
    from algorist.models.sharding import is_sharded

    if find_spec("vllm") is None:
        return "it is not installed"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or is_sharded(model):
        return "several processes share the training, where grpo.engine=vllm is chosen by hand"
    if torch.cuda.get_device_capability() < (8, 0):
        return "this GPU has no bfloat16"
    weights = [p for p in model.parameters() if p.dim() > 1]
    if not all(p.dtype.is_floating_point for p in weights):
        return "the weights are quantised"
    size = sum(p.numel() for p in weights)
    if rows < VLLM_FROM_ROWS and size < VLLM_FROM_WEIGHTS:
        return (
            f"it pays from {VLLM_FROM_ROWS} rows at a time or {VLLM_FROM_WEIGHTS / 1e9:.0f} billion weights, these are {rows} "
            f"and {size / 1e9:.1g} billion"
        )
    return None
