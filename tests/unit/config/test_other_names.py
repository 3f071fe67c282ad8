"""A name of another system is answered with ours: the keys and options of the five reference systems, and TRL's."""

from __future__ import annotations

import re

import pytest

from algorist.config.load import load_recipe
from algorist.config.other_names import other_names
from algorist.errors import ConfigError

KEYS = {
    "eval_steps": "grpo.eval_every", "num_generations": "grpo.group_size", "grpo_training": "the section grpo",
    "sft_training": "the section sft", "vllm_sampling": "the section grpo", "evaluation": "the section eval",
    "skip_sft": "--only grpo --resume", "skip_grpo": "--only sft", "val_every_steps": "sft.eval_every",
    "sft_data_path": "data.train.path", "val_samples": "data.eval.limit", "model_path": "model.name",
    "train_validation_split": "data.eval", "cosine_max_len": "max_len", "repetition_n_grams": "ngram",
    "no_fast": "fast: false", "dataset_name": "data.train.hub", "reward_weights": "weight", "no_wandb": "default",
    "unique_train_examples": "data.train.limit", "max_completion_length": "grpo.max_completion_tokens",
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_a_key_is_answered_with_ours(name: str) -> None:
    for key in (name, f"grpo.{name}"):
        with pytest.raises(
            ConfigError, match=rf"unknown key\. Here it is .*{re.escape(KEYS[name].rpartition('.')[2])}"
        ):
            load_recipe("quickstart", [f"{key}=1"])


def test_every_key_that_the_table_names_exists() -> None:
    for theirs, ours in other_names().items():
        key = ours.split("=")[0].split(":")[0].split(",")[0]
        if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) or theirs == "loss_params":
            continue
        value = {"grpo.entropy_control": "{target: 0.2}"}.get(key, "[]")
        try:
            load_recipe("sft-grpo-dapo", [f"{key}={value}"])
        except ConfigError as error:
            assert "unknown key" not in str(error), (theirs, ours)
