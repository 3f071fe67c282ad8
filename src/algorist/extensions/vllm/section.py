"""``grpo.vllm``, a union on its mode: vLLM in the training process, or a server of its own. Names are TRL's without ``vllm_``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from algorist.config.section import Section

INSTALL = (
    "Install it in an environment of its own, before algorist: pip install vllm (on CPU: make test-vllm shows how), "
    "or take the engine native"
)
"""Advice where vLLM is missing."""


class ColocatedVLLMSection(Section):
    """vLLM in the training process."""

    mode: Literal["colocate"] = "colocate"
    """``colocate``: vLLM in the training process."""
    gpu_memory_utilization: float = Field(0.3, gt=0, le=1)
    """vLLM's share of the GPU's memory; the rest is the update's."""
    kv_cache_memory_bytes: int | None = Field(None, ge=1)
    """Bytes of the cache, in place of the share; left out, on the CPU a quarter of the free memory, at most 1 GiB."""
    max_model_length: int | None = Field(None, ge=2)
    """Longest prompt with its completion in tokens; the model's context when left out."""
    max_num_seqs: int | None = Field(None, ge=1)
    """Most rows at a time (vLLM's choice)."""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Most tokens of a step (vLLM's choice)."""
    enable_sleep_mode: bool = True
    """Give the memory back during the update (CUDA)."""
    enforce_eager: bool | None = None
    """No compilation, no CUDA graphs; the default on a CPU."""
    model_impl: Literal["auto", "vllm", "transformers"] | None = None
    """Whose model code runs (vLLM's choice)."""


class VLLMServerSection(Section):
    """vLLM in a server that is running."""

    mode: Literal["server"] = "server"
    """``server``: one that is running."""
    server_base_url: str | None = None
    """Its address, ``http://HOST:PORT``; made of host and port when left out."""
    server_host: str | None = None
    """Its host; localhost when left out."""
    server_port: int = Field(8000, ge=1, le=65535)
    """Its port."""
    server_timeout: float | None = Field(None, gt=0)
    """Seconds to wait for its start; 60 when left out."""
    weight_transfer: Literal["folder", "nccl"] = "folder"
    """Transfer of the weights to the server; ``nccl`` was not run on GPUs."""
    sync_folder: str | None = None
    """Folder for the weights, under one path for both; a temporary one when left out."""

    @field_validator("server_base_url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(
                f"grpo.vllm.server_base_url is '{value}'; expected http://HOST:PORT, such as http://localhost:8000"
            )
        return value


def _with_mode(values: Any) -> Any:
    return {"mode": "colocate", **values} if isinstance(values, dict) else values


VLLMSection = Annotated[
    ColocatedVLLMSection | VLLMServerSection, Field(discriminator="mode"), BeforeValidator(_with_mode)
]
