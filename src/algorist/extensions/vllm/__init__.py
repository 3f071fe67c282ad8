"""vLLM samples the rollouts: in the training process (``engine.py``) or in a server (``server.py``). ``grpo.engine=vllm``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from algorist.config.section import Section
from algorist.errors import MissingExtraError
from algorist.extensions.vllm.section import INSTALL, ColocatedVLLMSection, VLLMSection, VLLMServerSection
from algorist.rollouts.base import EngineSettings, RolloutEngine
from algorist.rollouts.engines import engine
from algorist.training.extension import Extension, extension

FROM_ROWS, FROM_WEIGHTS = 32, 3e9
"""Sizes from which vLLM is worth waking and giving it the weights: completions at a time, or weights (an estimate)."""


class _Keys(Section):
    vllm: VLLMSection = Field(default_factory=ColocatedVLLMSection)
    """Settings of ``engine: vllm``. ``mode`` decides which keys there are: ``colocate`` (vLLM in the training process) or ``server``."""


@extension
class VLLM(Extension):
    name, keys = "vllm", {"grpo": _Keys}

    @classmethod
    def takes_part(cls, recipe: Any) -> bool:
        return cls.name in (recipe.grpo.engine, recipe.eval.engine)

    def check(self, plan: Any) -> Iterable[str]:
        from importlib.util import find_spec

        from algorist.extensions.vllm.sleep import why_no_sleep

        section = self.recipe.grpo
        if isinstance(section.vllm, ColocatedVLLMSection) and find_spec("vllm") is None:
            raise MissingExtraError(f"the engine is vllm, which is not installed. {INSTALL}")
        key = "grpo" if section.engine == self.name else "eval"
        if isinstance(section.vllm, ColocatedVLLMSection) and plan.processes.count > 1:
            yield (
                f"{key}.engine is vllm in the training process, which serves one process, and the run has {plan.processes.count}; start "
                "a server for all of them and take \"grpo.vllm={mode: server, server_base_url: 'http://HOST:8000'}\", or "
                f"{key}.engine=native"
            )
        if section.engine == self.name and (reason := why_no_sleep(section.vllm, plan.device)):
            yield reason


def _claims(model: Any, rows: int) -> tuple[bool, str]:
    """vLLM decodes faster than CUDA graphs do where there is much to decode; waking it and giving it the weights has to pay."""
    reason = _why_not(model, rows)
    if reason:
        return False, f"not vLLM: {reason}"
    return True, f"vLLM in this process, which is installed and pays for {rows} rows at a time"


def _why_not(model: Any, rows: int) -> str:
    import os
    from importlib.util import find_spec

    import torch

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
    if rows < FROM_ROWS and size < FROM_WEIGHTS:
        return (
            f"it pays from {FROM_ROWS} rows at a time or {FROM_WEIGHTS / 1e9:.0f} billion weights, these are {rows} and "
            f"{size / 1e9:.1g} billion"
        )
    return ""


def _advice(section: Any) -> list[str]:
    settings = section.vllm
    if not isinstance(settings, ColocatedVLLMSection):
        return []
    present = settings.gpu_memory_utilization
    share = round(max(0.1, present - 0.2), 2)
    if share >= present:
        return []
    return [f"grpo.vllm.gpu_memory_utilization={share:g} (instead of {present:g}; the rest is the update's)"]


@engine("vllm", claims=_claims, own_device=True, exact=False, advice=_advice)
def make(model: Any, tokenizer: Any, settings: EngineSettings) -> RolloutEngine:
    from algorist.extensions.vllm.engine import VLLMEngine
    from algorist.extensions.vllm.server import VLLMServerEngine

    section: Any = settings.section
    vllm = section.vllm if section else None
    if isinstance(vllm, VLLMServerSection):
        return VLLMServerEngine(model, tokenizer, settings=vllm, together=settings.together)
    return VLLMEngine(model, tokenizer, settings=vllm)
