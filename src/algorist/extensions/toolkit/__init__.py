"""Functions for people who write their own loop, under the names of the Stanford CS336 alignment assignment.

Arguments and results are those of the assignment: unbiased deviations, three results from ``compute_group_normalized_rewards``,
NaN for an empty mean. The pieces of algorist's own step are in ``objectives``, ``rollouts.collect`` and ``training.log_probs``.
``oneshot`` holds the functions of OneShotGRPO. Names are imported when they are first used: ``oneshot`` needs no torch. All of
them are names of ``algorist`` too.
"""

# ruff: noqa: F403
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algorist.extensions.toolkit.oneshot import *
    from algorist.extensions.toolkit.policy_gradient import *
    from algorist.extensions.toolkit.tokenize import *
    from algorist.objectives.masks import masked_mean as masked_mean
    from algorist.objectives.masks import masked_normalize as masked_normalize

_MODULES = {
    "objectives.masks": "masked_mean masked_normalize",
    "extensions.toolkit.oneshot": "DEFAULT_GRPO_ARGS MathTrainingSetup TrainingArtifacts build_chat_prompt build_text_generator "
    "create_math_training_setup format_for_grpo generate_math_solution load_gsm8k run_training "
    "save_prompt_and_response",
    "extensions.toolkit.policy_gradient": "compute_entropy compute_group_normalized_rewards compute_grpo_clip_loss "
    "compute_naive_policy_gradient_loss compute_per_instance_dpo_loss compute_policy_gradient_loss dpo_loss "
    "get_response_log_probs grpo_microbatch_train_step sft_microbatch_train_step token_log_probs",
    "extensions.toolkit.tokenize": "PackedSFTDataset get_packed_sft_dataset iterate_batches parse_gsm8k_response "
    "parse_mmlu_response tokenize_prompt_and_output",
}
MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"algorist.{MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
