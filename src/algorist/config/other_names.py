"""What other programs call our settings: a key or option of theirs is answered with ours."""

from __future__ import annotations

from collections.abc import Iterable

_THE_SAME = (
    "learning_rate warmup_ratio gradient_accumulation_steps weight_decay adam_beta1 adam_beta2 max_grad_norm "
    "logging_steps save_steps"
)
TRL_NAMES = {
    **{name: name for name in _THE_SAME.split()},
    "lr_scheduler_type": "lr_scheduler",
    "num_train_epochs": "epochs",
    "num_generations": "group_size",
    "per_device_train_batch_size": "batch_size",
    "max_completion_length": "max_completion_tokens",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "importance_sampling_level": "loss.importance",
}
"""TRL's name of an argument → its key below ``grpo`` in a recipe, where the two differ or a default is shown."""

OTHER_NAMES = {
    **{theirs: f"grpo.{ours}" for theirs, ours in TRL_NAMES.items()},
    **{
        key: f"grpo.{key}"
        for key in "max_steps beta temperature top_p top_k batch_size epochs group_size".split()
    },
    **{key: f"grpo.loss.{key}" for key in "clip_low clip_high delta importance".split()},
    "loss_params": "grpo.loss.KEY",
    "lr": "grpo.learning_rate",
    "loss_type": "grpo.loss",
    "scale_rewards": "grpo.advantage",
    "loss_agg_mode": "grpo.reduction",
    "off_policy_mask_threshold": "grpo.off_policy_mask",
    "entropy_coef": "grpo.entropy_bonus",
    "use_adaptive_entropy": "grpo.entropy_control={target: 0.2}",
    "entropy_target": "grpo.entropy_control.target",
    "entropy_coef_delta": "grpo.entropy_control.step",
    "entropy_coef_max": "grpo.entropy_control.most",
    "max_new_tokens": "grpo.max_completion_tokens",
    "max_tokens": "grpo.max_completion_tokens",
    "max_seq_length": "sft.max_length",
    "max_prompt_length": "data.train.max_prompt_tokens",
    "use_vllm": "grpo.engine=vllm",
    "tensor_parallel_size": "grpo.vllm={mode: server}",
    **{
        f"{prefix}importance_sampling_{theirs}": f"grpo.sampler_correction{ours}"
        for prefix in ("vllm_", "")
        for theirs, ours in (
            ("mode", ".mode"),
            ("clip_min", ".low"),
            ("clip_max", ".high"),
            ("correction", "=null"),
        )
    },
    "bf16": "model.dtype",
    "torch_dtype": "model.dtype",
    "model": "model.name",
    "model_name": "model.name",
    "model_name_or_path": "model.name",
    "dataset": "data.train.name",
    "dataset_name": "data.train.name",
    "data_path": "data.train.path",
    "split": "data.train.split",
    "limit": "data.train.limit",
    "system_prompt": "prompt.system_prompt",
    "system_prompt_path": "prompt.system_prompt_path",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "target_modules": "model.lora.target_modules",
    "r": "model.lora.rank",
    "max_lora_rank": "model.lora.rank",
    "use_rslora": "model.lora.rslora",
    "load_in_4bit": "model.quantization=4bit",
    "load_in_8bit": "model.quantization=8bit",
    "full_finetuning": "model.lora=null",
    "fast_inference": "grpo.engine=vllm",
    "gpu_memory_utilization": "grpo.vllm.gpu_memory_utilization",
    "use_gradient_checkpointing": "grpo.gradient_checkpointing",
    "random_state": "seed",
    "use_wandb": "report_to=[wandb]",
    "reward_funcs": "rewards",
    "save_path": "output_dir",
    "random_seed": "seed",
    **{key: key for key in "output_dir run_name report_to seed device".split()},
    "unique_train_examples": "data.train.limit",
    "config": "the first word after the verb, FILE.yaml or the name of a shipped recipe",
}


def ours_for(name: str, section: str = "", keys: Iterable[str] = ()) -> str:
    """Return ``" Here it is grpo.group_size=VALUE."`` for a name of another program, or an empty string.

    Args:
        name: Their key or option.
        section: Where it was written; its own key is named if it is among ``keys``.
        keys: The section's keys.
    """
    key = OTHER_NAMES.get(name.lstrip("-").replace("-", "_"))
    if key is None:
        return ""
    home, _, last = key.rpartition(".")
    if section and last in keys and "." not in home:
        key = f"{section}.{last}"
    return f" Here it is {key if '=' in key or ' ' in key else f'{key}=VALUE'}."
