"""The ``TrainingArguments`` that SFT and GRPO share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from algorist.config.schema import OptimSection
from algorist.models.precision import on_gpu


def optim_arguments(
    section: OptimSection,
    *,
    output_dir: Path,
    seed: int,
    device: torch.device,
    report_to: Sequence[str],
    mixed: Mapping[str, bool] | None = None,
) -> dict[str, Any]:
    """Return the ``TrainingArguments`` that SFT and GRPO share; ``mixed`` is the model's ``mixed_precision``."""
    warmup: float = section.warmup_ratio if section.warmup_steps is None else section.warmup_steps
    return {
        "output_dir": str(output_dir),
        "learning_rate": section.learning_rate,
        "lr_scheduler_type": section.lr_scheduler,
        "warmup_steps": warmup,
        "weight_decay": section.weight_decay,
        "adam_beta1": section.adam_beta1,
        "adam_beta2": section.adam_beta2,
        "max_grad_norm": section.max_grad_norm,
        "optim": section.optim,
        "logging_steps": section.logging_steps,
        "save_steps": section.save_steps,
        "save_total_limit": section.save_total_limit,
        "gradient_checkpointing": section.gradient_checkpointing,
        "seed": seed,
        "data_seed": seed,
        **(mixed or {"bf16": False, "fp16": False}),
        "use_cpu": device.type == "cpu",
        "report_to": list(report_to) or "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": on_gpu(device),
    }
