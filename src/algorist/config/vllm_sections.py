"""``grpo.vllm``, a union on its mode: vLLM in the training process, or a server of its own. Names are TRL's without ``vllm_``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from algorist.config.section import Section


class _VLLM(Section):
    integration: Literal["algorist", "trl"] = "algorist"
    """Whose integration talks to vLLM. TRL's also runs vLLM in several processes or on several devices without a server."""
    importance_sampling_correction: bool = True
    """Weigh the loss by how far vLLM's log-probs are from the trainer's."""
    importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "sequence_mask"
    """Correct per token or per sequence; ratios out of bounds are truncated, or their tokens masked."""
    importance_sampling_clip_min: float | None = Field(None, ge=0)
    """Lower bound of the ratio; none when left out."""
    importance_sampling_clip_max: float | None = Field(3.0, gt=0)
    """Upper bound of the ratio."""

    @model_validator(mode="after")
    def _check_integration(self) -> _VLLM:
        others = ONLY_OURS if self.integration == "trl" else ONLY_TRLS
        given = [key for key in type(self).model_fields if key in others and getattr(self, key) is not None]
        if given:
            mine = "algorist" if self.integration == "trl" else "trl"
            raise ValueError(
                f"grpo.vllm.{given[0]} is a setting of grpo.vllm.integration={mine}, not of {self.integration}: take that, or "
                f"leave {given[0]} out"
            )
        return self


class ColocatedVLLMSection(_VLLM):
    """vLLM in the training process."""

    mode: Literal["colocate"] = "colocate"
    """``colocate``: vLLM in the training process."""
    gpu_memory_utilization: float = Field(0.3, gt=0, le=1)
    """vLLM's share of the GPU's memory; the rest is the update's."""
    kv_cache_memory_bytes: int | None = Field(None, ge=1)
    """Bytes of the cache, in place of the share; on the CPU a quarter of the free memory, at most 1 GiB, when left out."""
    max_model_length: int | None = Field(None, ge=2)
    """Longest prompt with its completion in tokens; the model's context when left out."""
    max_num_seqs: int | None = Field(None, ge=1)
    """Most rows at a time; vLLM chooses when left out."""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Most tokens of a step; vLLM chooses when left out."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Devices that share vLLM's model; above 1 with TRL's integration."""
    enable_sleep_mode: bool = False
    """Give the memory back during the update (CUDA)."""
    enforce_eager: bool | None = None
    """No compilation and no CUDA graphs; left out, so on the CPU only."""
    model_impl: Literal["auto", "vllm", "transformers"] | None = None
    """Whose model code runs; vLLM chooses when left out."""


class VLLMServerSection(_VLLM):
    """vLLM in a server that is running already."""

    mode: Literal["server"] = "server"
    """``server``: a vLLM server, in a process, an environment or on a machine of its own."""
    server_base_url: str | None = None
    """Its address, ``http://HOST:PORT``; made of host and port when left out."""
    server_host: str | None = None
    """Its host; localhost when left out."""
    server_port: int = Field(8000, ge=1, le=65535)
    """Its port."""
    server_timeout: float | None = Field(None, gt=0)
    """Seconds to wait for a server that is still starting; 60, or TRL's 240, when left out."""
    sync_folder: str | None = None
    """Folder that trainer and server both see under this path; the weights go through it. The system's temporary folder when left out."""
    group_port: int | None = Field(None, ge=1, le=65535)
    """Port for TRL's weight transfer by NCCL."""

    @field_validator("server_base_url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(
                f"grpo.vllm.server_base_url is '{value}'; expected http://HOST:PORT, such as http://localhost:8000"
            )
        return value


ONLY_OURS = set("kv_cache_memory_bytes max_num_seqs max_num_batched_tokens enforce_eager sync_folder".split())
"""Settings that TRL's integration has no argument for."""
ONLY_TRLS = {"group_port"}


def _with_mode(given: Any) -> Any:
    return {"mode": "colocate", **given} if isinstance(given, dict) else given


VLLMSection = Annotated[
    ColocatedVLLMSection | VLLMServerSection, Field(discriminator="mode"), BeforeValidator(_with_mode)
]


def own_server(vllm: ColocatedVLLMSection | VLLMServerSection) -> bool:
    """Whether ``grpo.vllm`` asks for a server that our engine talks to, not TRL's integration."""
    return isinstance(vllm, VLLMServerSection) and vllm.integration == "algorist"
