"""algorist: turn a small language model into a mathematical reasoner.

The names below are imported when they are first used, so that ``import algorist`` needs no torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# transformers must not pull TensorFlow in; only set when the user has not decided.
for _name, _value in (("TRANSFORMERS_NO_TF", "1"), ("TRANSFORMERS_NO_TENSORFLOW", "1"), ("USE_TF", "0")):
    os.environ.setdefault(_name, _value)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from algorist.config import load_recipe
    from algorist.data.gsm8k import extract_hash_answer
    from algorist.grading import grade, grade_completion
    from algorist.models.load import load_policy
    from algorist.objectives import advantage, loss, policy_loss, token_losses
    from algorist.prompts import get_format
    from algorist.prompts.chat import encode_prompt
    from algorist.rewards import (
        DEFAULT_REWARD_WEIGHTS,
        RewardBreakdown,
        build_rewards,
        default_reward_functions,
        question_only_reward_fn,
        r1_zero_reward_fn,
        reward,
    )
    from algorist.rollouts import make_engine
    from algorist.rollouts.base import SamplingParams
    from algorist.rollouts.collect import collect
    from algorist.runs.pipeline import run_recipe
    from algorist.toolkit import (
        compute_entropy,
        compute_group_normalized_rewards,
        compute_grpo_clip_loss,
        compute_naive_policy_gradient_loss,
        compute_per_instance_dpo_loss,
        compute_policy_gradient_loss,
        get_packed_sft_dataset,
        get_response_log_probs,
        grpo_microbatch_train_step,
        iterate_batches,
        masked_mean,
        masked_normalize,
        parse_gsm8k_response,
        parse_mmlu_response,
        sft_microbatch_train_step,
        tokenize_prompt_and_output,
    )
    from algorist.toolkit.oneshot import (
        DEFAULT_GRPO_ARGS,
        MathTrainingSetup,
        TrainingArtifacts,
        build_chat_prompt,
        build_text_generator,
        create_math_training_setup,
        format_for_grpo,
        generate_math_solution,
        load_gsm8k,
        run_training,
        save_prompt_and_response,
    )
    from algorist.training.batch import Batch
    from algorist.training.log_probs import LogProbs

__all__ = [
    "Batch",
    "DEFAULT_GRPO_ARGS",
    "DEFAULT_REWARD_WEIGHTS",
    "LogProbs",
    "MathTrainingSetup",
    "RewardBreakdown",
    "SamplingParams",
    "TrainingArtifacts",
    "advantage",
    "build_chat_prompt",
    "build_rewards",
    "build_text_generator",
    "collect",
    "compute_entropy",
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_naive_policy_gradient_loss",
    "compute_per_instance_dpo_loss",
    "compute_policy_gradient_loss",
    "create_math_training_setup",
    "default_reward_functions",
    "encode_prompt",
    "extract_hash_answer",
    "format_for_grpo",
    "generate_math_solution",
    "get_format",
    "get_packed_sft_dataset",
    "get_response_log_probs",
    "grade",
    "grade_completion",
    "grpo_microbatch_train_step",
    "iterate_batches",
    "load_gsm8k",
    "load_policy",
    "load_recipe",
    "loss",
    "make_engine",
    "masked_mean",
    "masked_normalize",
    "parse_gsm8k_response",
    "parse_mmlu_response",
    "policy_loss",
    "question_only_reward_fn",
    "r1_zero_reward_fn",
    "reward",
    "run_recipe",
    "run_training",
    "save_prompt_and_response",
    "sft_microbatch_train_step",
    "token_losses",
    "tokenize_prompt_and_output",
]

_MODULES = {
    "config": "load_recipe",
    "data.gsm8k": "extract_hash_answer",
    "grading": "grade grade_completion",
    "models.load": "load_policy",
    "objectives": "advantage loss policy_loss token_losses",
    "prompts": "get_format",
    "prompts.chat": "encode_prompt",
    "rewards": "DEFAULT_REWARD_WEIGHTS RewardBreakdown build_rewards default_reward_functions question_only_reward_fn "
    "r1_zero_reward_fn reward",
    "rollouts": "make_engine",
    "rollouts.base": "SamplingParams",
    "rollouts.collect": "collect",
    "runs.pipeline": "run_recipe",
    "toolkit.oneshot": "DEFAULT_GRPO_ARGS MathTrainingSetup TrainingArtifacts build_chat_prompt build_text_generator "
    "create_math_training_setup format_for_grpo generate_math_solution load_gsm8k run_training save_prompt_and_response",
    "training.batch": "Batch",
    "training.log_probs": "LogProbs",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used; what stands in no other module is one of ``toolkit``."""
    if name not in __all__:
        from algorist.errors import nearest

        raise AttributeError(f"module 'algorist' has no attribute '{name}'.{nearest(name, __all__)}")
    module = _MODULE_OF.get(name, "toolkit")
    value = getattr(importlib.import_module(f"algorist.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
