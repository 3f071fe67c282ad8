"""Attention kernel of the passes through a model's module.

algorist's own fast paths compute their attention themselves, whatever is chosen here: the native engine's decoder, and the
shared-prefix update, which puts its own function in for the time of its pass. The kernel serves every other pass: SFT,
TRL's log-prob pass, ``model.generate``, and models that the decoder does not cover.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available

from algorist.config.section import ModelSection
from algorist.errors import ConfigError, nearest
from algorist.models.precision import HALF, compute_dtype
from algorist.models.sharding import unwrap

FLASH = "flash_attention_2"
log = logging.getLogger("algorist.models.attention")

KERNELS = ("sdpa", "eager", FLASH)
_LARGEST_HEAD = 256


def pick_attention(section: ModelSection, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the kernel to ask for, or None for transformers' own choice (sdpa where the model has it).

    Raises:
        ConfigError: The recipe names flash_attention_2, which cannot run here.
    """
    kernel = section.attn_implementation
    on_cuda, half, installed = device.type == "cuda", dtype in HALF, flash_works(device)
    if kernel is None:
        return FLASH if on_cuda and half and installed else None
    if kernel != FLASH:
        return kernel
    way_out = "or leave model.attn_implementation out (sdpa)"
    if not on_cuda:
        raise ConfigError(
            f"model.attn_implementation is {FLASH}, which needs an NVIDIA GPU, but the device is {device}; take "
            f"device=cuda on a machine that has one, {way_out}"
        )
    if not installed:
        raise ConfigError(
            f"model.attn_implementation is {FLASH}, which does not work here: it needs the package flash_attn (2.3.3 or newer, "
            f"built for this torch; pip install 'algorist[flash]') and a GPU of compute capability 8.0 or more, {way_out}"
        )
    if not half:
        raise ConfigError(
            f"model.attn_implementation is {FLASH}, which takes bfloat16 and float16 only, but the weights are "
            f"{str(dtype).removeprefix('torch.')}; take model.dtype=bfloat16, {way_out}"
        )
    return kernel


def flash_works(device: torch.device) -> bool:
    """Whether flash_attn is installed, fits this torch, and the GPU is new enough for it (Ampere)."""
    if device.type != "cuda" or not is_flash_attn_2_available():
        return False
    try:
        importlib.import_module("flash_attn")
    except (ImportError, OSError) as error:  # a wheel for another torch
        log.warning("flash_attn is installed but cannot be imported (%s); sdpa is used", error)
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def set_attention(model: Any, section: ModelSection, device: torch.device, dtype: torch.dtype) -> None:
    """Let a loaded model run with the picked kernel; a model that flash attention does not cover keeps its own.

    Raises:
        ConfigError: The recipe names a kernel that the model or this machine does not have.
    """
    name = pick_attention(section, device, dtype)
    if name is None or (section.attn_implementation is None and not takes_flash(model)):
        return
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        if section.attn_implementation is None:
            log.warning("%s cannot run with %s (%s); it keeps its own", type(model).__name__, name, error)
            return
        reason = str(error).strip().partition("\n")[0].partition(". ")[0][:160]
        raise ConfigError(
            f"model.attn_implementation is '{name}', which {type(model).__name__} cannot run with ({reason})."
            f"{nearest(name, KERNELS)} Expected one of {', '.join(KERNELS)}, or leave it out"
        ) from None


def takes_flash(model: Any) -> bool:
    """Whether flash attention 2 computes what this model's attention computes."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return bool(getattr(model, "_supports_flash_attn", False)) and 0 < size <= _LARGEST_HEAD and size % 8 == 0


def describe(model: Any) -> str:
    """Return weights' type, device, attention and further kernels of a loaded model in words."""
    base = unwrap(model)
    weight = base.get_input_embeddings().weight
    kind, products = (str(dtype).removeprefix("torch.") for dtype in (weight.dtype, compute_dtype(model)))
    where = f"{weight.device}" if kind == products else f"{weight.device}, products {products}"
    more = getattr(base, "algorist_kernels", "")
    return f"{kind} on {where}, attention {base.config._attn_implementation}{more}"
