"""Bases in 4 or 8 bit through bitsandbytes: QLoRA (Dettmers et al., 2305.14314) on GPUs and, slower, on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from algorist.config.section import Section
from algorist.errors import ConfigError, MissingExtraError
from algorist.models.loaders import Loader, loader, own_loader
from algorist.training.extension import Extension, extension

if TYPE_CHECKING:
    import torch


class _Keys(Section):
    quantization: Literal["4bit", "8bit"] | None = None
    """Keep the base of an adapter, or a model that is only evaluated, in 4-bit NF4 (QLoRA) or 8-bit numbers, through
    bitsandbytes; embeddings, norms and head stay in ``dtype``."""


@extension
class Quantization(Extension):
    name, keys = "quantization", {"model": _Keys}

    def check(self, plan: Any) -> Iterable[str]:
        section = self.recipe.model
        if (self.recipe.sft.enabled or self.recipe.grpo.enabled) and section.lora is None:
            yield (
                f"model.quantization is {section.quantization} without model.lora; quantised weights are not trained, an adapter on "
                "them is: model.lora={rank: 16}"
            )
        if section.name == "tiny" or own_loader(section):
            yield (
                f"model.quantization is {section.quantization}, which quantises saved models through transformers; take "
                "model.name=FOLDER or a hub name, and model.backend=transformers"
            )


@loader("quantization")
class _BitsAndBytes(Loader):
    smaller = {"quantization": "4bit"}  # noqa: RUF012

    def arguments(self, section: Any, device: torch.device, compute: torch.dtype) -> dict[str, Any]:
        """Return the arguments of ``from_pretrained`` that quantize while it loads.

        4 bit is NF4 with quantised constants (4.13 bits per weight) and products in ``compute``.

        Raises:
            MissingExtraError: bitsandbytes is not installed, or does not load.
            ConfigError: The device is Apple's GPU.
        """
        if section.quantization is None:
            return {}
        if device.type == "mps":
            raise ConfigError(
                "model.quantization has no kernels for Apple's GPU; take device=cpu, or leave it out"
            )
        try:
            import bitsandbytes  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            raise MissingExtraError(
                f"model.quantization needs bitsandbytes ({' '.join(str(error).split())[:150]}): pip install 'algorist[quantization]', "
                "or leave it out: model.quantization=null"
            ) from None
        from transformers import BitsAndBytesConfig

        if section.quantization == "8bit":
            # one per layer and token
            warnings.filterwarnings("ignore", message="MatMul8bitLt: inputs will be cast")
            config = BitsAndBytesConfig(load_in_8bit=True)
        else:
            config = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=compute,
            )
        return {"quantization_config": config, "device_map": {"": device}}

    def loaded(self, model: Any, section: Any) -> None:
        keep_as_trained(model)


def keep_as_trained(model: Any) -> None:
    """Let 4-bit layers on the CPU compute alike in training and sampling.

    bitsandbytes repacks the weights for bfloat16 products outside training (``support_avx512bf16_for_cpu``): the sampler would
    differ from the trainer, and widths that are no multiple of 64 fail.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
