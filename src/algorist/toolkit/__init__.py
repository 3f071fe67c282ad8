"""Functions for people who write their own loop, under the names of the Stanford CS336 alignment assignment.

Arguments and results are those of the assignment: unbiased deviations, three results from ``compute_group_normalized_rewards``,
NaN for an empty mean. The pieces of algorist's own step are in ``objectives``, ``rollouts.collect`` and ``training.log_probs``.
``oneshot`` holds the functions of OneShotGRPO. Names are imported when they are first used: ``oneshot`` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algorist.objectives.masks import masked_mean, masked_normalize
    from algorist.toolkit.entropy import compute_entropy
    from algorist.toolkit.log_probs import get_response_log_probs, token_log_probs
    from algorist.toolkit.microbatch import grpo_microbatch_train_step, sft_microbatch_train_step
    from algorist.toolkit.packed_dataset import PackedSFTDataset, get_packed_sft_dataset, iterate_batches
    from algorist.toolkit.policy_gradient import (
        compute_group_normalized_rewards,
        compute_grpo_clip_loss,
        compute_naive_policy_gradient_loss,
        compute_policy_gradient_loss,
    )
    from algorist.toolkit.preference import compute_per_instance_dpo_loss, dpo_loss
    from algorist.toolkit.responses import parse_gsm8k_response, parse_mmlu_response
    from algorist.toolkit.tokenize import tokenize_prompt_and_output

_MODULES = {
    "objectives.masks": "masked_mean masked_normalize",
    "toolkit.entropy": "compute_entropy",
    "toolkit.log_probs": "get_response_log_probs token_log_probs",
    "toolkit.microbatch": "grpo_microbatch_train_step sft_microbatch_train_step",
    "toolkit.packed_dataset": "PackedSFTDataset get_packed_sft_dataset iterate_batches",
    "toolkit.policy_gradient": "compute_group_normalized_rewards compute_grpo_clip_loss "
    "compute_naive_policy_gradient_loss compute_policy_gradient_loss",
    "toolkit.preference": "compute_per_instance_dpo_loss dpo_loss",
    "toolkit.responses": "parse_gsm8k_response parse_mmlu_response",
    "toolkit.tokenize": "tokenize_prompt_and_output",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "PackedSFTDataset",
    "compute_entropy",
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_naive_policy_gradient_loss",
    "compute_per_instance_dpo_loss",
    "compute_policy_gradient_loss",
    "dpo_loss",
    "get_packed_sft_dataset",
    "get_response_log_probs",
    "grpo_microbatch_train_step",
    "iterate_batches",
    "masked_mean",
    "masked_normalize",
    "parse_gsm8k_response",
    "parse_mmlu_response",
    "sft_microbatch_train_step",
    "token_log_probs",
    "tokenize_prompt_and_output",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"algorist.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
