"""Every private name of TRL and of the Hugging Face Trainer that algorist touches, in one place.

``tests/contract/test_trl_seam.py`` pins these names and signatures. A new TRL release is admitted by running that
test and widening ``TRL_VERSIONS``.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# TRL sends a request on every trainer construction unless this is set before it is imported.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
import trl
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import FusedCausalLMOutput as FusedCausalLMOutput
from trl.trainer.utils import RepeatSampler

from algorist.errors import MissingExtraError

TRL_VERSIONS = SpecifierSet(">=1.16,<1.17")

# Methods of GRPOTrainer that AlgoristGRPOTrainer overrides: name → parameters that we rely on, in order.
OVERRIDDEN_METHODS: dict[str, tuple[str, ...]] = {
    "_generate_single_turn": ("self", "prompt_ids", "images", "multimodal_fields", "num_generations"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_get_per_token_logps_and_entropies": (
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
    ),
    "_compute_loss": ("self", "model", "inputs"),
    "_prepare_inputs": ("self", "generation_batch"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    "_get_train_sampler": ("self", "dataset"),
    "_get_output_dir": ("self", "trial"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_save": ("self", "output_dir", "state_dict"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_issue_warnings_after_load": ("self", "load_result"),
    "_get_grad_norm": ("self", "model", "grad_norm"),
}

# Attributes of a constructed GRPOTrainer that we read or write.
READ_ATTRIBUTES = (
    "accelerator",
    "args",
    "beta",
    "aux_loss_enabled",
    "current_gradient_accumulation_steps",
    "eos_token_ids",
    "loss_type",
    "model_wrapped",
    "num_generations",
    "num_iterations",
    "processing_class",
    "repetition_penalty",
    "reward_func_names",
    "reward_weights",
    "state",
    "temperature",
    "top_entropy_quantile",
    "use_vllm",
    "_buffered_inputs",
    "_entropy_bonus_enabled",
    "_metrics",
    "_step",
    "_tokenizer",
)

# Row tensors of a buffered micro-batch (first dimension B) and the columns they share.
PROMPT_TENSORS = ("prompt_ids", "prompt_mask")
COMPLETION_TENSORS = (
    "completion_ids",
    "completion_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
    "tool_mask",
)
MULTIMODAL_TENSORS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)

# Loss types whose gradient over an accumulation window does not depend on which rows share a micro-batch. ``bnpo``
# divides by the tokens of each micro-batch.
ROW_ORDER_FREE_LOSSES = frozenset({"grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"})
# Loss types in which a row of zero advantage adds exactly zero to loss, gradient and every logged ratio.
ZERO_ADVANTAGE_FREE_LOSSES = frozenset({"grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"})


def check_trl_version(version: str | None = None) -> None:
    """Refuse a TRL release whose private methods were not tested.

    Args:
        version: Version to check; the installed one when left out.

    Raises:
        MissingExtraError: The version is outside ``TRL_VERSIONS``.
    """
    found = version or trl.__version__
    if Version(found) not in TRL_VERSIONS:
        raise MissingExtraError(
            f"TRL {found} is installed, but algorist's trainer was tested with {TRL_VERSIONS} only (it overrides "
            f'private methods). Install a tested release: pip install "trl{TRL_VERSIONS}"'
        )


def check_seams(trainer_class: type[Any] = GRPOTrainer) -> list[str]:
    """Return what is different from the TRL we know, one line per difference; empty when all seams are in place."""
    problems = []
    for name, expected in OVERRIDDEN_METHODS.items():
        method = getattr(trainer_class, name, None)
        if method is None:
            problems.append(f"{trainer_class.__name__}.{name} is gone")
            continue
        found = tuple(inspect.signature(inspect.unwrap(method)).parameters)
        if found[: len(expected)] != expected:
            problems.append(
                f"{trainer_class.__name__}.{name} takes {found}, expected to start with {expected}"
            )
    return problems


def expects_old_log_probs(args: Any, num_iterations: int) -> bool:
    """Whether TRL runs a pass for old log-probs after generation (generation and optimizer steps are misaligned)."""
    return args.gradient_accumulation_steps % (args.steps_per_generation * num_iterations) != 0


def accumulation_window(args: Any) -> int | None:
    """Micro-batches of one buffered generation that certainly share one optimizer step, or None if unclear."""
    if args.steps_per_generation % args.gradient_accumulation_steps == 0:
        return args.gradient_accumulation_steps
    if args.gradient_accumulation_steps % args.steps_per_generation == 0:
        return args.steps_per_generation
    return None


class EpochSampler(RepeatSampler):
    """TRL's sampler, with the same orders, that finds the order of any epoch from the seed alone.

    TRL's own continues one generator from epoch to epoch: a run resumed in the second epoch would see the first one's order.
    """

    def set_epoch(self, epoch: int) -> None:
        """Put the generator where ``epoch`` epochs leave it (one permutation each)."""
        if self.shuffle and self.seed is not None:
            self.generator.manual_seed(self.seed)
            for _ in range(epoch):
                torch.randperm(self.num_samples, generator=self.generator)


@contextmanager
def reference_is_the_policy(model: Any) -> Iterator[None]:
    """While a trainer is made: its KL reference is a frozen copy of ``model`` as it is passed.

    TRL loads the reference by the name in the model's config. For a model from scratch there is none, and after SFT in the
    same process it is the base model, so the penalty would pull the policy back behind SFT. A name instead of a model, and
    adapters (TRL copies them itself), are left to TRL.
    """
    original = grpo_trainer.create_model_from_path

    def frozen_copy(*_: Any, **__: Any) -> Any:
        return copy.deepcopy(model).requires_grad_(False).eval()

    if not isinstance(model, torch.nn.Module):
        yield
        return
    grpo_trainer.create_model_from_path = frozen_copy
    try:
        yield
    finally:
        grpo_trainer.create_model_from_path = original
