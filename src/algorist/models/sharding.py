"""Sharded models (FSDP, DeepSpeed ZeRO-3), and what DDP, DeepSpeed and PEFT wrap around a model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

_SHARDERS = ("torch.distributed.", "deepspeed.")


def is_sharded(model: Any) -> bool:
    """Whether the parameters lie in parts on several processes (FSDP, DeepSpeed ZeRO-3)."""
    names = {k.__name__ for k in type(model).__mro__}
    return "FSDPModule" in names or any(hasattr(p, "ds_id") for p in model.parameters())


def own_part(parameter: Any) -> Any:
    """Return this process's part of a parameter: all of it, but with FSDP2 and ZeRO-3."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def shapes_of(model: Any) -> Any:
    """Return a copy of a model whose weights are shapes only (device meta): little to send to another process."""
    shapes = {id(p): torch.nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, shapes)


def wrapped_module(model: Any) -> Any:
    """Return the module that DDP or DeepSpeed's engine wraps, or the model itself."""
    wrapped = isinstance(model, DistributedDataParallel) or type(model).__name__ == "DeepSpeedEngine"
    return model.module if wrapped else model


def unwrap(model: Any) -> Any:
    """Return the transformers model inside DDP, DeepSpeed and PEFT wrappers."""
    inner = wrapped_module(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def plain_class(module: Any) -> type:
    """Return a module's class without what FSDP2 put in front of it (``FSDPQwen2ForCausalLM`` → ``Qwen2ForCausalLM``)."""
    kind = type(module)
    bases = kind.__bases__
    return bases[1] if len(bases) == 2 and bases[0].__name__ == "FSDPModule" else kind


def is_sharding_hook(hook: Any) -> bool:
    """Whether a forward hook only gathers or frees weights."""
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", None) or type(function).__module__).startswith(_SHARDERS)


def why_not_by_forward(model: Any, reason: str) -> str:
    """Explain why a sharded model cannot sample through its own forward; ``reason`` is why it would have to."""
    return (
        f"the weights of {type(model).__name__} lie in parts on several processes, and its rollouts would go through its own "
        f"forward ({reason}), which gathers them anew for every token while the processes finish at different tokens: the run "
        "would hang. Start it without sharding (algorist run --launch ddp), or take an engine that samples elsewhere: a vLLM server"
    )
