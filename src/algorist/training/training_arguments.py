"""The ``TrainingArguments`` that SFT and GRPO share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.training_args import OptimizerNames

from algorist.config.schema import GRPOSection, OptimSection, Recipe, SFTSection
from algorist.errors import ConfigError, check_known
from algorist.models.precision import on_gpu, round_stochastically
from algorist.models.sharding import own_part
from algorist.store.stages import STAGES
from algorist.training.distributed import uses_fsdp2

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
OF_PARTS = (*OPTIMIZERS, "sgd", "adagrad", "rmsprop")
"""Optimisers for weights that FSDP2 shards, whose states a checkpoint brings back; torchao's of 8 bit cannot be read again."""
SAME_NAMES = {
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "optim", "logging_steps", "save_steps",
    "save_total_limit", "gradient_checkpointing",
}  # fmt: skip

WITH_WARMUP = {"constant": "constant_with_warmup"}
"""Scheduler of a recipe → that of transformers, whose ``constant`` has no warm-up, whatever is asked."""


def check_optimizers(recipe: Recipe) -> None:
    """Refuse an optimiser that transformers does not know, or whose package is not installed (ConfigError, MissingExtraError)."""
    names = [str(name.value) for name in OptimizerNames]
    for stage in STAGES:
        section = getattr(recipe, stage)
        if section.enabled:
            section.check_package(stage)
        said = f"{stage}.optim is '{section.optim}', which is no optimiser of transformers"
        usual = "Take adamw_torch, adamw_torch_fused or adamw_8bit (needs bitsandbytes)"
        check_known(section.optim, names, said, usual)
        if section.enabled and uses_fsdp2() and section.optim not in OF_PARTS:
            raise ConfigError(
                f"{stage}.optim is {section.optim}, which cannot update the parts of the weights that each process has under FSDP2. "
                "Take adamw_torch, or --launch zero3"
            )


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
    if section.optim == "adamw_torch" and (on_gpu(device) or device.type == "cpu"):
        # One pass over each weight; torch's default makes another copy of them on a GPU, and takes eight times as long on a CPU.
        shared["optim"] = "adamw_torch_fused"
    return {
        **shared,
        "output_dir": str(output_dir),
        "num_train_epochs": section.epochs,
        "max_steps": section.max_steps or -1,
        "lr_scheduler_type": WITH_WARMUP.get(rate := section.lr_scheduler, rate),
        "warmup_steps": section.warmup_ratio if section.warmup_steps is None else section.warmup_steps,
        "seed": seed,
        "data_seed": seed,
        **(mixed or {"bf16": False, "fp16": False}),
        "use_cpu": device.type == "cpu",
        "report_to": list(report_to) or "none",
        "use_cache": True,  # it is saved with the model; every forward of a training says for itself
        "disable_tqdm": True,
        "dataloader_pin_memory": on_gpu(device),
    }


# ---- adamW for bare bfloat16 weights: moments in float32, weights rounded up or down at random


def bare_optimizer(model: Any, section: OptimSection) -> tuple[type, dict[str, Any]] | None:
    """Return the optimizer for a model whose trained weights are bfloat16, or None where they are float32.

    Raises:
        ConfigError: Such weights with another optimizer than AdamW, which would round their updates away.
    """
    if torch.bfloat16 not in {p.dtype for p in model.parameters() if p.requires_grad}:
        return None
    if section.optim not in OPTIMIZERS:
        raise ConfigError(
            f"optim is {section.optim} for trained bfloat16 weights, which lose nearly every update without stochastic rounding; "
            f"only {OPTIMIZERS[0]} rounds so here. Leave model.dtype out (float32 weights, 16-bit products), or optim"
        )
    betas = (section.adam_beta1, section.adam_beta2)
    return RoundingAdamW, {"lr": section.learning_rate, "betas": betas, "eps": 1e-8}


class RoundingAdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay whose results are rounded stochastically to bfloat16.

    The random numbers depend on the step and the parameter only, so that a continued run draws the same.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        number = 0
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                number += 1
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["step"] += 1
                count = int(state["step"])
                weight, grad = own_part(parameter), own_part(parameter.grad).float()
                mean = own_part(state["exp_avg"]).lerp_(grad, 1 - first)
                square = own_part(state["exp_avg_sq"]).lerp_(grad.square(), 1 - second)
                size = (square / (1 - second**count)).sqrt_().add_(group["eps"])
                value = weight.float().mul_(1 - group["lr"] * group["weight_decay"])
                value.addcdiv_(mean, size, value=-group["lr"] / (1 - first**count))
                seed = count * 1_000_003 + number
                weight.copy_(round_stochastically(value, seed) if weight.dtype == torch.bfloat16 else value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load without torch's cast of the moments to the weights' type."""
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        order = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        for parameter, number in zip(order, numbers, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                if number in saved:
                    self.state[parameter][name] = saved[number][name].to(parameter.device, copy=True)
