"""Loading through Unsloth, for NVIDIA GPUs. The only file that imports it; it needs an environment of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from algorist.config.section import Section
from algorist.errors import ConfigError, MissingExtraError, is_out_of_memory
from algorist.models.loaders import Loader, loader
from algorist.training.extension import Extension, extension

if TYPE_CHECKING:
    import torch

# Without its dependencies: its releases ask for trl <= 1.15, which no installer puts beside trl 1.16.
INSTALL = "pip install --no-deps 'unsloth>=2025.11.3' unsloth_zoo 'torch-c-dlpack-ext>=0.1.3'"


class _Keys(Section):
    backend: Literal["transformers", "unsloth"] = "transformers"
    """Loader; ``unsloth`` needs an NVIDIA GPU and an environment with Unsloth."""


@extension
class Unsloth(Extension):
    name, keys = "unsloth", {"model": _Keys}


@loader("unsloth")
class _Loader(Loader):
    def takes(self, section: Any) -> bool:
        return bool(section.backend == "unsloth")

    def check(self, section: Any, device: torch.device) -> None:
        """Refuse settings that Unsloth does not support (ConfigError), and machines that cannot run it (MissingExtraError)."""
        if section.name == "tiny":
            raise ConfigError(
                "model.backend is unsloth while model.name is tiny; unsloth loads hub models and model folders only. Take "
                "model.backend=transformers, or a model's name"
            )
        if device.type != "cuda":
            raise MissingExtraError(
                f"model.backend is unsloth, which needs an NVIDIA GPU, but the device is {device}. On a machine with one: "
                f"{INSTALL} and device=cuda; here take model.backend=transformers"
            )
        if section.lora is not None and section.lora.dora:
            raise ConfigError(
                "model.lora.dora is true while model.backend is unsloth, which has no DoRA; take model.lora.dora=false, or "
                "model.backend=transformers"
            )
        if section.attn_implementation is not None:
            raise ConfigError(
                f"model.attn_implementation is {section.attn_implementation} while model.backend is unsloth, which brings its "
                "own attention; leave it out, or take model.backend=transformers"
            )
        _fast_language_model()

    def make(self, section: Any, device: torch.device, dtype: torch.dtype, *, seed: int, longest: int) -> Any:
        """Return the model with its adapter, if it has one; all weights are trained without.

        Unsloth's own tokenizer is not used, so that prompts are the same with both backends.

        ``longest`` is the most tokens of a prompt with its completion; ``seed`` is the adapter's.

        Raises:
            ConfigError: Unsloth cannot load the model.
        """
        import torch

        from algorist.models.loaders import lora_targets

        fast, lora = _fast_language_model(), section.lora
        with torch.random.fork_rng(devices=[]):  # Unsloth seeds the process
            try:
                model, _ = fast.from_pretrained(
                    model_name=section.name,
                    revision=section.revision,
                    dtype=dtype,
                    max_seq_length=longest,
                    load_in_4bit=False,
                    full_finetuning=lora is None,
                    trust_remote_code=section.trust_remote_code,
                    use_gradient_checkpointing=False,  # the trainer turns it on where the recipe asks
                    use_exact_model_name=True,  # no mirror of another owner, to which ``revision`` would not belong
                    random_state=seed,
                )
            except (OSError, ValueError, RuntimeError) as error:
                if is_out_of_memory(error):
                    raise
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:240]
                raise ConfigError(
                    f"unsloth cannot load the model '{section.name}': {reason} Take model.backend=transformers, or a model "
                    "that unsloth knows"
                ) from error
            if lora is None:
                return model
            return fast.get_peft_model(
                model,
                r=lora.rank,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=lora_targets(model, lora.target_modules),
                use_rslora=lora.rslora,
                use_gradient_checkpointing=False,
                random_state=seed,
                max_seq_length=longest,
            )


def _fast_language_model() -> Any:
    # Without it Unsloth's forward gives no logits while training, which every loss of ours reads.
    os.environ.setdefault("UNSLOTH_RETURN_LOGITS", "1")
    try:
        from unsloth import FastLanguageModel
    except (ImportError, NotImplementedError) as error:
        raise MissingExtraError(
            f"model.backend is unsloth, but unsloth cannot be imported ({error}); install it with "
            f"{INSTALL} on a CUDA machine, or take model.backend=transformers"
        ) from None
    return FastLanguageModel
