"""The recipes of the reference systems: every number against the statement, every name registered."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from algorist.config.load import load_recipe, recipe_names
from algorist.config.schema import Recipe
from algorist.data import DATASETS
from algorist.models.loaders import lora_targets
from algorist.prompts import FORMATS
from algorist.rewards import build_rewards
from algorist.runs.asking import recipe_format
from algorist.runs.draft import check_names
from algorist_grader import MATCHERS

# Recipe -> (item of the reference systems, dotted key, value). "weights" is name -> weight in the recipe's order.
STATED: dict[str, list[tuple[str, str, Any]]] = {
    "oneshot-gsm8k": [
        ("S0.7", "model.name", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("6.1 adapter: none", "model.lora", None),
        ("S0.23", "data.train.name", "gsm8k"),
        ("S0.23", "data.train.split", "train"),
        ("S0.41 prompt 256", "data.train.max_prompt_tokens", 256),
        ("S0.2", "prompt.format", "reasoning_answer"),
        ("S0.33", "matcher", "numeric"),
        ("S0.28", "weights", {"correctness_numeric": 1.0, "numeric": 0.1, "tag_fraction": 0.1}),
        ("6.1 SFT: no", "sft.enabled", False),
        ("S0.39", "grpo.learning_rate", 5e-6),
        ("S0.39", "grpo.lr_scheduler", "cosine"),
        ("S0.39", "grpo.warmup_ratio", 0.1),
        ("S0.39", "grpo.epochs", 1),
        ("S0.39", "grpo.group_size", 16),
        ("S0.39", "grpo.gradient_accumulation_steps", 4),
        ("S0.39 one problem a micro-batch: its 16 completions", "grpo.batch_size", 16),
        ("S0.41 generation batch 16", "grpo.batch_size", 16),
        ("S0.40", "grpo.save_steps", 100),
        ("S0.41", "grpo.adam_beta1", 0.9),
        ("S0.41", "grpo.adam_beta2", 0.99),
        ("S0.41", "grpo.weight_decay", 0.1),
        ("S0.41", "grpo.logging_steps", 1),
        ("S0.41", "grpo.max_completion_tokens", 200),
        ("S0.41", "grpo.max_grad_norm", 0.1),
        ("S0.41", "report_to", []),
        ("S0.44", "grpo.vllm.gpu_memory_utilization", 0.3),
        ("S0.44 off by default", "grpo.engine", "auto"),
    ],
    "sft-grpo-dapo": [
        ("S1.3", "model.name", "Qwen/Qwen3-4B-Base"),
        ("S1.22", "model.lora.rank", 32),
        ("S1.22", "model.lora.alpha", 64),
        ("S1.22", "model.lora.target_modules", "attention+mlp"),
        ("S1.22", "seed", 3407),
        ("S1.27", "data.sft.name", "openmath_reasoning"),
        ("S1.27", "data.sft.split", "cot"),
        ("S1.30", "data.sft.numeric_answers_only", True),
        ("S1.28", "data.train.params.of", "dapo"),
        ("S1.18", "data.train.params.share", 0.9),
        ("S1.33", "data.train.params.seed", 3407),
        ("S1.32", "data.train.max_prompt_percentile", 90),
        ("S1.20 a prompt in 2048", "data.train.max_prompt_tokens", 256),
        ("S1.20 what is left of 2048", "grpo.max_completion_tokens", 2048 - 256),
        ("S1.18", "data.eval.params.share", 0.9),
        ("S1.33", "data.eval.params.seed", 3407),
        ("S1.18", "data.eval.params.part", "held_out"),
        ("S1.35", "prompt.format", "working_solution"),
        (
            "S1.39 to S1.42",
            "weights",
            {"exact_format": 1.0, "approx_format": 1.0, "check_answer": 1.0, "check_numbers": 1.0},
        ),
        ("S1.23", "sft.batch_size", 1),
        ("S1.23", "sft.gradient_accumulation_steps", 1),
        ("S1.23", "sft.warmup_steps", 5),
        ("S1.23", "sft.epochs", 2),
        ("S1.23", "sft.learning_rate", 2e-4),
        ("S1.23", "sft.weight_decay", 0.001),
        ("S1.23", "sft.lr_scheduler", "linear"),
        ("S1.23", "sft.logging_steps", 5),
        ("S1.23", "sft.save_steps", 100),
        ("S1.30 half of 2048", "sft.max_length", 1024),
        ("S1.19", "grpo.max_steps", 100),
        ("S1.16", "grpo.group_size", 2),
        ("S1.16", "grpo.gradient_accumulation_steps", 2),
        ("S1.16", "grpo.batch_size", 1),
        ("S1.18", "grpo.eval_every", 20),
        ("S1.21", "grpo.temperature", 1.2),
        ("S1.21", "grpo.top_p", 0.95),
        ("S1.21 -1 is off", "grpo.top_k", 0),
        ("S1.21", "grpo.min_p", 0.05),
        ("S1.24", "grpo.learning_rate", 5e-6),
        ("S1.24", "grpo.weight_decay", 0.001),
        ("S1.24", "grpo.warmup_ratio", 0.1),
        ("S1.24", "grpo.lr_scheduler", "linear"),
        ("S1.24", "grpo.logging_steps", 1),
        ("S1.24", "grpo.save_steps", 100),
        ("S1.15", "grpo.vllm.gpu_memory_utilization", 0.7),
        ("S1.22", "sft.gradient_checkpointing", True),
        ("S1.25", "grpo.samples_every", 5),
    ],
    "gist-gsm8k": [
        ("S2.15", "model.name", "Qwen/Qwen2.5-1.5B-Instruct"),
        ("S2.16", "model.lora.rank", 16),
        ("S2.16", "model.lora.alpha", 64),
        ("S2.16", "model.lora.dropout", 0.05),
        ("S2.16", "model.lora.target_modules", "attention+mlp"),
        ("S2.4", "data.train.name", "gsm8k"),
        ("S2.18 prompt 256", "data.train.max_prompt_tokens", 256),
        ("S2.3", "prompt.format", "reasoning_answer"),
        ("S2.7", "matcher", "exact"),
        (
            "S2.14",
            "weights",
            {"xmlcount": 1.0, "soft_format": 1.0, "strict_format": 1.0, "int": 1.0, "correctness": 1.0},
        ),
        ("6.1 SFT: no", "sft.enabled", False),
        ("S2.18", "grpo.group_size", 16),
        ("S2.18", "grpo.gradient_accumulation_steps", 4),
        ("S2.18 per device 4", "grpo.batch_size", 4),
        ("S2.18", "grpo.learning_rate", 5e-6),
        ("S2.18", "grpo.lr_scheduler", "cosine"),
        ("S2.18", "grpo.warmup_ratio", 0.1),
        ("S2.18", "grpo.adam_beta1", 0.9),
        ("S2.18", "grpo.adam_beta2", 0.99),
        ("S2.18", "grpo.weight_decay", 0.1),
        ("S2.18", "grpo.max_grad_norm", 0.1),
        ("S2.18", "grpo.max_completion_tokens", 786),
        ("S2.18", "grpo.epochs", 1),
        ("S2.18", "grpo.logging_steps", 1),
        ("S2.14 one sample per call", "grpo.samples_every", 1),
        ("S2.21", "grpo.save_steps", 100),
        ("S2.22", "grpo.vllm.gpu_memory_utilization", 0.3),
        ("S2.23", "eval.samples", 0),
        ("S2.23", "eval.max_completion_tokens", 256),
        ("S2.23", "eval.batch_size", 32),
    ],
    "gist-gsm8k-llama": [
        ("S2.15", "model.name", "meta-llama/Llama-3.2-1B-Instruct"),
        ("S2.16", "model.lora.rank", 16),
    ],
    "math-sft": [
        ("S3.6", "model.name", "Qwen/Qwen2.5-Math-1.5B-Instruct"),
        ("6.1 adapter: none", "model.lora", None),
        ("S3.12", "data.train.name", "sft_jsonl"),
        ("S3.25", "data.eval.name", "math"),
        ("S3.21", "prompt.format", "r1_zero"),
        ("S3.24", "matcher", "symbolic"),
        ("S3.28", "weights", {"r1_zero": 1.0}),
        ("S3.10", "sft.batch_size", 64),
        ("S3.10", "sft.gradient_accumulation_steps", 8),
        ("S3.10", "sft.epochs", 20),
        ("S3.10", "sft.learning_rate", 5e-5),
        ("S3.10", "sft.weight_decay", 0.0),
        ("S3.10", "sft.adam_beta1", 0.9),
        ("S3.10", "sft.adam_beta2", 0.999),
        ("S3.10", "sft.max_grad_norm", 1.0),
        ("S3.10", "sft.warmup_ratio", 0.0),
        ("S3.10", "sft.lr_scheduler", "cosine"),
        ("S3.10", "sft.eval_every", 5),
        ("S3.10", "eval.max_completion_tokens", 1024),
        ("S3.10 temperature 0", "eval.samples", 0),
        ("S3.10", "eval.baseline", False),
        ("S3.20 as the baseline", "eval.stop_strings", ["</answer>"]),
        ("S3.10", "data.train.limit", None),
        ("S3.10", "data.eval.limit", None),
        ("S3.10", "seed", 42),
        ("S3.7", "grpo.enabled", False),
    ],
    "math-sft-correct-full": [
        ("S3.11", "data.train.path", "MATH/sft_correct.jsonl"),
        ("S3.11", "data.train.limit", None),
        ("S3.11", "sft.epochs", 10),
        ("S3.11", "sft.batch_size", 16),
        ("S3.11", "sft.gradient_accumulation_steps", 8),
        ("S3.11", "sft.eval_every", 20),
    ],
    "math-baseline": [
        ("S3.6", "model.name", "Qwen/Qwen2.5-Math-1.5B-Instruct"),
        ("S3.20", "eval.baseline", True),
        ("S3.20", "eval.temperature", 1.0),
        ("S3.20", "eval.top_p", 1.0),
        ("S3.20", "eval.max_completion_tokens", 1024),
        ("S3.20", "eval.batch_size", 256),
        ("S3.20 stop at the closing answer tag", "eval.stop_strings", ["</answer>"]),
        ("S3.21", "prompt.format", "r1_zero"),
        ("S3.20 evaluation only", "sft.enabled", False),
        ("S3.20 evaluation only", "grpo.enabled", False),
    ],
    "math-grpo": [
        ("S3.25", "data.train.name", "math"),
        ("S3.25", "data.train.path", None),
        ("6.3", "sft.enabled", False),
        ("S3.37", "grpo.enabled", True),
        ("S3.37", "grpo.max_steps", 200),
        ("S3.37", "grpo.group_size", 8),
        ("S3.37", "grpo.gradient_accumulation_steps", 128),
        ("S3.37 train batch 256", "grpo.batch_size", 256 // 128),
        ("S3.37 rollout batch 256", "grpo.steps_per_generation", None),
        ("S3.37", "grpo.num_iterations", 1),
        ("S3.37", "grpo.temperature", 1.0),
        ("S3.37", "grpo.max_completion_tokens", 1024),
        ("S3.37 per_example_mean", "grpo.loss.name", "grpo"),
        ("S3.37", "grpo.advantage", "group_normalized"),
        ("S3.37", "grpo.loss.clip_low", 0.2),
        ("S3.37", "grpo.loss.clip_high", 0.2),
        ("S3.37", "grpo.learning_rate", 1e-5),
        ("S3.37", "grpo.adam_beta1", 0.9),
        ("S3.37", "grpo.adam_beta2", 0.95),
        ("S3.37", "grpo.eval_every", 10),
        ("S3.37", "grpo.save_steps", 50),
        ("6.1 schedule", "grpo.lr_scheduler", "cosine"),
        ("S3.28", "weights", {"r1_zero": 1.0}),
    ],
    "r1-zero-numina": [
        ("S4.9", "model.name", "Qwen/Qwen2.5-0.5B"),
        ("S4.25 the hub's main", "model.revision", None),
        ("S4.7 off, it cannot be switched off there", "model.trust_remote_code", False),
        ("6.1 adapter: none", "model.lora", None),
        ("S4.26", "data.train.name", "numina_tir"),
        ("S4.26", "data.eval.split", "test"),
        ("S4.28", "prompt.format", "think_answer"),
        ("S4.15", "matcher", "latex_verify"),
        (
            "S4.3",
            "weights",
            {"accuracy": 1.0, "format": 1.0, "reasoning_steps": 1.0, "cosine": 1.0, "repetition": 1.0},
        ),
        ("S4.15", "rewards.0.params", {"neutral": 0.5}),
        ("S4.19", "rewards.2.params", {"steps": 3}),
        ("S4.20", "rewards.3.params", {"max_len": 1000}),
        ("S4.21", "rewards.4.params", {"ngram": 3, "max_penalty": -0.1}),
        ("6.1 SFT: no", "sft.enabled", False),
        ("S4.10", "grpo.group_size", 8),
        ("S4.11", "grpo.batch_size", 4),
        ("S4.11", "grpo.gradient_accumulation_steps", 2),
        ("S4.7", "grpo.epochs", 1),
        ("S4.7", "grpo.learning_rate", 5e-5),
        ("S4.7", "grpo.save_steps", 50),
        ("S4.7", "grpo.max_completion_tokens", 512),
        ("S4.7", "seed", 42),
        ("S4.8", "grpo.warmup_ratio", 0.1),
        ("S4.8", "grpo.weight_decay", 0.01),
        ("S4.8", "grpo.logging_steps", 10),
        ("S4.8", "grpo.save_total_limit", 2),
        ("S4.8", "eval.batch_size", 32),
        ("6.1 schedule", "grpo.lr_scheduler", "linear"),
        ("S4.35", "grpo.gradient_checkpointing", False),
    ],
}

# Recipe -> (item, lowest and highest total that the statement names).
TOTALS = {
    "oneshot-gsm8k": ("S0.28", 0.0, 1.2),
    "sft-grpo-dapo": ("S1.43", -6.5, 12.5),
    "math-grpo": ("S3.28", 0.0, 1.0),
    "r1-zero-numina": ("S4.23", -0.6, 4.0),
}


def value_at(recipe: Recipe, dotted: str) -> Any:
    if dotted == "weights":
        return {spec.name: spec.weight for spec in recipe.rewards}
    node: Any = recipe
    for part in dotted.split("."):
        node = (
            node[int(part)]
            if isinstance(node, list)
            else node[part]
            if isinstance(node, dict)
            else getattr(node, part)
        )
    return node


@pytest.mark.parametrize("name", STATED)
def test_a_recipe_has_the_numbers_of_the_statement(name: str) -> None:
    recipe = load_recipe(name).recipe
    found = {(item, key): value_at(recipe, key) for item, key, _ in STATED[name]}
    assert found == {(item, key): value for item, key, value in STATED[name]}
    stated_order = [list(value) for _, key, value in STATED[name] if key == "weights"]
    assert not stated_order or stated_order == [[spec.name for spec in recipe.rewards]]


def test_every_system_has_its_recipes_and_the_underscore_names_work() -> None:
    assert set(STATED) | {"quickstart", "smoke-cpu"} <= set(recipe_names())
    assert load_recipe("r1_zero_numina").recipe == load_recipe("r1-zero-numina").recipe


@pytest.mark.parametrize("name", recipe_names())
def test_every_name_in_a_recipe_exists(name: str) -> None:
    recipe = load_recipe(name).recipe
    check_names(recipe, recipe_format(recipe))
    assert recipe.name == name and recipe.description
    assert recipe.prompt.format in FORMATS and recipe.matcher in MATCHERS
    sections = [recipe.data.train, recipe.data.eval, *([recipe.data.sft] if recipe.data.sft else [])]
    for section in sections:
        assert section.name in DATASETS
        assert section.params.get("of", section.name) in DATASETS
    assert recipe.data.eval.split != "train" or recipe.data.eval.params.get("part") == "held_out"


@pytest.mark.parametrize("name", TOTALS)
def test_the_rewards_span_the_stated_total(name: str) -> None:
    item, low, high = TOTALS[name]
    recipe = load_recipe(name).recipe
    rewards = build_rewards(recipe.rewards, recipe_format(recipe), matcher=recipe.matcher)
    pairs = [(r, spec.weight) for r, spec in zip(rewards, recipe.rewards, strict=True)]
    assert sum(r.high * w for r, w in pairs) == pytest.approx(high), item
    assert sum(r.low * w for r, w in pairs) == pytest.approx(low), item


def explain(name: str, completion: str, gold: str) -> float:
    recipe = load_recipe(name).recipe
    rewards = build_rewards(recipe.rewards, recipe_format(recipe), matcher=recipe.matcher)
    return sum(
        spec.weight * r(prompts=["q"], completions=[completion], answer=[gold])[0]
        for r, spec in zip(rewards, recipe.rewards, strict=True)
    )


@pytest.mark.parametrize(
    ("item", "name", "completion", "total"),
    [
        ("S0.28", "oneshot-gsm8k", "<reasoning>\n6 * 7\n</reasoning>\n<answer>\n42\n</answer>", 1.2),
        ("S0.31", "oneshot-gsm8k", "<answer>41", 0.1 * 1 / 4),
        ("S1.46", "sft-grpo-dapo", "no idea", -6.5),
        ("S1.43", "sft-grpo-dapo", "6 * 7\n<end_working_out>\n<SOLUTION>\n42\n</SOLUTION>", 12.5),
        ("S2.13", "gist-gsm8k", "<reasoning>\n6 * 7\n</reasoning>\n<answer>\n42\n</answer>\n", 4.0),
        ("S3.28", "math-grpo", "6 * 7 </think> <answer> 42 </answer>", 1.0),
        ("S3.28", "math-grpo", "6 * 7 </think> <answer> 41 </answer>", 0.0),
        ("S3.27", "math-grpo", "6 * 7 </think>\n<answer> 42 </answer>", 0.0),
    ],
)
def test_totals_of_whole_completions(item: str, name: str, completion: str, total: float) -> None:
    assert explain(name, completion, "42") == pytest.approx(total), item


def test_a_right_r1_zero_completion_beats_the_same_with_a_wrong_answer() -> None:
    text = (
        "<think>\nStep 1: six rows. Step 2: seven each. Step 3: 6 * 7.\n</think>\n\n<answer>\n%s\n</answer>"
    )
    right, wrong = (explain("r1-zero-numina", text % told, "$42$") for told in ("42", "41"))
    assert 3.9 < right <= 4.0  # S4.39
    assert right - wrong > 2  # S4.22: accuracy and cosine both see the gold answer


def test_group_and_batch_rules_hold_in_every_grpo_recipe() -> None:
    for name in STATED:
        grpo = load_recipe(name).recipe.grpo
        if grpo.enabled:
            assert grpo.group_size >= 2, name
            assert grpo.batch_size * grpo.gradient_accumulation_steps % grpo.group_size == 0, name
    grpo = load_recipe("math-grpo").recipe.grpo
    assert grpo.batch_size * grpo.gradient_accumulation_steps == 256  # S3.37
    grpo = load_recipe("r1-zero-numina").recipe.grpo
    assert grpo.batch_size * grpo.gradient_accumulation_steps == 8  # S4.11
    grpo = load_recipe("r1-zero-numina", ["grpo.batch_size=8"]).recipe.grpo
    assert grpo.batch_size * grpo.gradient_accumulation_steps == 16  # S4.11


def test_the_adapter_reaches_the_seven_projections() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    lora = load_recipe("sft-grpo-dapo").recipe.model.lora
    assert lora is not None
    found = lora_targets(LlamaForCausalLM(config), lora.target_modules)
    assert set(found) == {
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    }  # S1.22, S2.16
