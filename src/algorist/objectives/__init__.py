"""The readable mathematics: advantages, ratios, KL, losses, masks. Pure functions of tensors that import torch only.

The trainer's loss is tested against these, and they are the toolkit for a loop of your own. The names ``compute_…``,
``masked_…``, ``…_microbatch_train_step`` and so on have the arguments and results of the Stanford CS336 alignment
assignment: unbiased deviations, three results from ``compute_group_normalized_rewards``, NaN for an empty mean.
"""

from algorist.objectives.advantages import (
    batch_normalized,
    compute_group_normalized_rewards,
    group_centered,
    group_normalized,
    leave_one_out,
    useful_groups,
)
from algorist.objectives.entropy import compute_entropy
from algorist.objectives.kl import k1, k2, k3
from algorist.objectives.log_probs import get_response_log_probs, token_log_probs
from algorist.objectives.losses import (
    clip_fractions,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
    policy_loss,
    reduce_loss,
)
from algorist.objectives.masks import masked_mean, masked_normalize, masked_sum
from algorist.objectives.packed import PackedSFTDataset, get_packed_sft_dataset, iterate_batches
from algorist.objectives.preference import compute_per_instance_dpo_loss, dpo_loss
from algorist.objectives.ratios import log_ratio, sequence_ratio, token_ratio, truncated_weights
from algorist.objectives.responses import parse_gsm8k_response, parse_mmlu_response
from algorist.objectives.steps import grpo_microbatch_train_step, sft_microbatch_train_step
from algorist.objectives.tokenize import tokenize_prompt_and_output

__all__ = [
    "PackedSFTDataset",
    "batch_normalized",
    "clip_fractions",
    "compute_entropy",
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_naive_policy_gradient_loss",
    "compute_per_instance_dpo_loss",
    "compute_policy_gradient_loss",
    "dpo_loss",
    "get_packed_sft_dataset",
    "get_response_log_probs",
    "group_centered",
    "group_normalized",
    "grpo_microbatch_train_step",
    "iterate_batches",
    "k1",
    "k2",
    "k3",
    "leave_one_out",
    "log_ratio",
    "masked_mean",
    "masked_normalize",
    "masked_sum",
    "parse_gsm8k_response",
    "parse_mmlu_response",
    "policy_loss",
    "reduce_loss",
    "sequence_ratio",
    "sft_microbatch_train_step",
    "token_log_probs",
    "token_ratio",
    "tokenize_prompt_and_output",
    "truncated_weights",
    "useful_groups",
]
