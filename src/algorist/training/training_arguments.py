"""The ``TrainingArguments`` that SFT and GRPO share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from algorist.config.schema import GRPOSection, SFTSection
from algorist.models.precision import on_gpu

SAME_NAMES = {
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "optim", "logging_steps", "save_steps",
    "save_total_limit", "gradient_checkpointing",
}  # fmt: skip


def optim_arguments(
    section: SFTSection | GRPOSection,
    *,
    output_dir: Path,
    seed: int,
    device: torch.device,
    report_to: Sequence[str] = (),
    mixed: Mapping[str, bool] | None = None,
) -> dict[str, Any]:
    """Return the ``TrainingArguments`` that SFT and GRPO share; ``mixed`` is the model's ``mixed_precision``."""
    shared = section.model_dump(include=SAME_NAMES)
    if on_gpu(device) and section.optim == "adamw_torch":
        # One kernel for all weights; torch's default there makes another copy of them.
        shared["optim"] = "adamw_torch_fused"
    return {
        **shared,
        "output_dir": str(output_dir),
        "num_train_epochs": section.epochs,
        "max_steps": section.max_steps or -1,
        "lr_scheduler_type": section.lr_scheduler,
        "warmup_steps": section.warmup_ratio if section.warmup_steps is None else section.warmup_steps,
        "seed": seed,
        "data_seed": seed,
        **(mixed or {"bf16": False, "fp16": False}),
        "use_cpu": device.type == "cpu",
        "report_to": list(report_to) or "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": on_gpu(device),
    }
