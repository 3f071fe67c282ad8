"""Master type and compute type: what weights are kept in, and what the matrix products run in.

Adam's steps are far smaller than a 16-bit number of a weight's size can hold: at a learning rate of 1e-6, bfloat16 weights
stay as they are in 98 of 100 cases. Trained weights are therefore float32 (the masters), and products run in 16 bit under
autocast: bfloat16 where the GPU has tensor cores for it, else float16 with a scaled loss; on a CPU bfloat16 where the processor has units
for it and the model is wide enough to gain, else float32. What is not trained (the base of
an adapter, a model that is evaluated) lies in the compute type; the adapter's factors are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from algorist.errors import ConfigError
from algorist.models.products import WIDE, wide_dtype
from algorist.models.sharding import unwrap

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALF = (torch.bfloat16, torch.float16)
GPUS = {"cuda"}
"""Types of device with CUDA's kernels and torch.cuda's memory figures."""


def on_gpu(device: torch.device | str) -> bool:
    """Whether a device is an NVIDIA (or ROCm) GPU."""
    return torch.device(device).type in GPUS


def unused_gpu_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU; what torch's allocator holds without using it is free for us, not for the driver."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def has_tensor_cores_for(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of a 16-bit type run at full speed: bfloat16 is emulated before compute capability 8.0.

    A model of shapes only (device meta) is taken for one on a recent GPU.
    """
    if device.type == "meta":
        return True
    if not on_gpu(device):
        return False
    return dtype != torch.bfloat16 or bool(torch.cuda.is_bf16_supported(including_emulation=False))


@dataclass(frozen=True, slots=True)
class Precision:
    """Types of a model's weights (``master``) and of its matrix products (``compute``)."""

    master: torch.dtype
    compute: torch.dtype

    @property
    def autocast(self) -> bool:
        """Whether the products run under autocast."""
        return self.compute != self.master


def pick_precision(section: Any, device: torch.device, *, trained: bool = True, width: int = 0) -> Precision:
    """Return the types that a recipe's model section asks for.

    Args:
        section: ``dtype`` (of the weights), ``compute_dtype`` and ``lora``; ``auto`` leaves the choice to the device.
        device: Where the model runs.
        trained: All weights may be trained; else they need no more than the compute type.
        width: Width of the model (its hidden size), which decides on a CPU.

    Raises:
        ConfigError: float32 products of 16-bit weights, or of one 16-bit type with weights of the other.
    """
    fast = torch.float32
    if on_gpu(device):
        fast = torch.bfloat16 if has_tensor_cores_for(torch.bfloat16, device) else torch.float16
    elif device.type == "cpu" and width >= WIDE:
        fast = wide_dtype()
    master, compute = DTYPES.get(section.dtype), DTYPES.get(section.compute_dtype)
    if master is None:
        keeps = trained and section.lora is None
        master = torch.float32 if keeps else compute or fast
    if compute is None:
        compute = fast if master == torch.float32 else master
    if master in HALF and compute != master:
        raise ConfigError(
            f"model.compute_dtype is {section.compute_dtype} while model.dtype is {section.dtype}; products run in the weights' "
            f"type or in a smaller one. Leave model.compute_dtype out, or take model.dtype=float32"
        )
    if compute == torch.bfloat16 and on_gpu(device) and not has_tensor_cores_for(compute, device):
        raise ConfigError(
            "model.compute_dtype or model.dtype is bfloat16, which this GPU only emulates (it takes compute capability 8.0): "
            "attention and the head have no kernel for it there. Leave both out: the products are float16 then"
        )
    if compute == torch.float16 and master == torch.float32 and not on_gpu(device):
        raise ConfigError(
            f"model.compute_dtype is float16, whose gradients are scaled on GPUs only, but the device is {device}; leave it out, "
            "or take bfloat16"
        )
    return Precision(master, compute)


def set_compute(model: Any, dtype: torch.dtype) -> None:
    """Note on a transformers model in which type its products run."""
    model.algorist_compute_dtype = dtype


def compute_dtype(model: Any) -> torch.dtype:
    """Return the type of a model's products: what it was loaded with, else its weights' type."""
    weights = weight_dtype(model)
    noted: torch.dtype = getattr(unwrap(model), "algorist_compute_dtype", weights)
    return noted if weights == torch.float32 else weights


def weight_dtype(model: Any) -> torch.dtype:
    """Return the type of a model's weights (of an adapter's base)."""
    dtype: torch.dtype = unwrap(model).get_input_embeddings().weight.dtype
    return dtype


def round_stochastically(value: Tensor, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return float32 numbers in a 16-bit type, rounded up with the probability of the share that is cut off."""
    cut = 1 << (16 if dtype == torch.bfloat16 else 13)  # the last bits of float32 that the type does not have
    generator = torch.Generator(value.device).manual_seed(seed)
    noise = torch.randint(cut, value.shape, generator=generator, device=value.device, dtype=torch.int32)
    rounded = (value.view(torch.int32) + noise) & -cut
    # Infinity and NaN have no neighbours.
    return torch.where(value.isfinite(), rounded.view(torch.float32), value).to(dtype)


def mixed_precision(model: Any, device: torch.device) -> dict[str, bool]:
    """Return transformers' ``bf16`` and ``fp16``: autocast in the compute type, float16 with a gradient scaler.

    Raises:
        ConfigError: Trained weights of float16, whose gradients cannot be scaled.
    """
    compute = compute_dtype(model)
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    if torch.float16 in trained:
        raise ConfigError(
            "model.dtype is float16 for weights that are trained: their gradients vanish, and a scaler cannot hold them. "
            "Leave model.dtype out (float32 weights, float16 products), train an adapter (model.lora.rank=16), or take "
            "model.dtype=bfloat16"
        )
    # Bare bfloat16 needs no autocast: its products are bfloat16 anyway.
    mixed = torch.float32 in trained  # an adapter's factors too, whose inputs would be copied to float32
    return {"bf16": mixed and compute == torch.bfloat16, "fp16": mixed and compute == torch.float16}


def autocast_of(model: Any, device: torch.device) -> torch.autocast:
    """Return the context of a model's forward in training on ``device``."""
    mixed = any(mixed_precision(model, device).values())
    return torch.autocast(device.type, dtype=compute_dtype(model), enabled=mixed, cache_enabled=False)
