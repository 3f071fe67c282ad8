"""The recipes of the reference systems: every number against the statement, every name registered."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from algorist.config.load import load_recipe, recipe_names
from algorist.config.schema import Recipe
from algorist.data import DATASETS
from algorist.errors import ConfigError
from algorist.models.loaders import lora_targets
from algorist.prompts import FORMATS
from algorist.rewards import build_rewards
from algorist.runs.asking import recipe_format
from algorist.runs.draft import check_names
from algorist_grader import MATCHERS

# Recipe -> (dotted key, value that its system states). "weights" is name -> weight in the recipe's order.
STATED: dict[str, list[tuple[str, Any]]] = {
    "oneshot-gsm8k": [
        ("model.name", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("model.lora", None),
        ("data.train.name", "gsm8k"),
        ("data.train.split", "train"),
        ("data.train.max_prompt_tokens", 256),
        ("prompt.format", "reasoning_answer"),
        ("matcher", "numeric"),
        ("weights", {"correctness_numeric": 1.0, "numeric": 0.1, "tag_fraction": 0.1}),
        ("sft.enabled", False),
        ("grpo.learning_rate", 5e-6),
        ("grpo.lr_scheduler", "cosine"),
        ("grpo.warmup_ratio", 0.1),
        ("grpo.epochs", 1),
        ("grpo.group_size", 16),
        ("grpo.gradient_accumulation_steps", 4),
        ("grpo.batch_size", 16),
        ("grpo.batch_size", 16),
        ("grpo.save_steps", 100),
        ("grpo.adam_beta1", 0.9),
        ("grpo.adam_beta2", 0.99),
        ("grpo.weight_decay", 0.1),
        ("grpo.logging_steps", 1),
        ("grpo.max_completion_tokens", 200),
        ("grpo.max_grad_norm", 0.1),
        ("report_to", []),
        ("grpo.vllm.gpu_memory_utilization", 0.3),
        ("grpo.engine", "auto"),
    ],
    "sft-grpo-dapo": [
        ("model.name", "Qwen/Qwen3-4B-Base"),
        ("model.lora.rank", 32),
        ("model.lora.alpha", 64),
        ("model.lora.target_modules", "attention+mlp"),
        ("seed", 3407),
        ("data.sft.name", "openmath_reasoning"),
        ("data.sft.split", "cot"),
        ("data.sft.numeric_answers_only", True),
        ("data.train.params.of", "dapo"),
        ("data.train.params.share", 0.9),
        ("data.train.params.seed", 3407),
        ("data.train.max_prompt_percentile", 90),
        ("data.train.max_prompt_tokens", 256),
        ("grpo.max_completion_tokens", 2048 - 256),
        ("data.eval.params.share", 0.9),
        ("data.eval.params.seed", 3407),
        ("data.eval.params.part", "held_out"),
        ("prompt.format", "working_solution"),
        ("weights", {"exact_format": 1.0, "approx_format": 1.0, "check_answer": 1.0, "check_numbers": 1.0}),
        ("sft.batch_size", 1),
        ("sft.gradient_accumulation_steps", 1),
        ("sft.warmup_steps", 5),
        ("sft.epochs", 2),
        ("sft.learning_rate", 2e-4),
        ("sft.weight_decay", 0.001),
        ("sft.lr_scheduler", "linear"),
        ("sft.logging_steps", 5),
        ("sft.save_steps", 100),
        ("sft.max_length", 1024),
        ("grpo.max_steps", 100),
        ("grpo.group_size", 2),
        ("grpo.gradient_accumulation_steps", 2),
        ("grpo.batch_size", 1),
        ("grpo.eval_every", 20),
        ("grpo.temperature", 1.2),
        ("grpo.top_p", 0.95),
        ("grpo.top_k", 0),
        ("grpo.min_p", 0.05),
        ("grpo.learning_rate", 5e-6),
        ("grpo.weight_decay", 0.001),
        ("grpo.warmup_ratio", 0.1),
        ("grpo.lr_scheduler", "linear"),
        ("grpo.logging_steps", 1),
        ("grpo.save_steps", 100),
        ("grpo.vllm.gpu_memory_utilization", 0.7),
        ("sft.gradient_checkpointing", True),
        ("grpo.samples_every", 5),
    ],
    "gist-gsm8k": [
        ("model.name", "Qwen/Qwen2.5-1.5B-Instruct"),
        ("model.lora.rank", 16),
        ("model.lora.alpha", 64),
        ("model.lora.dropout", 0.05),
        ("model.lora.target_modules", "attention+mlp"),
        ("data.train.name", "gsm8k"),
        ("data.train.max_prompt_tokens", 256),
        ("prompt.format", "reasoning_answer"),
        ("matcher", "exact"),
        (
            "weights",
            {"xmlcount": 1.0, "soft_format": 1.0, "strict_format": 1.0, "int": 1.0, "correctness": 1.0},
        ),
        ("sft.enabled", False),
        ("grpo.group_size", 16),
        ("grpo.gradient_accumulation_steps", 4),
        ("grpo.batch_size", 4),
        ("grpo.learning_rate", 5e-6),
        ("grpo.lr_scheduler", "cosine"),
        ("grpo.warmup_ratio", 0.1),
        ("grpo.adam_beta1", 0.9),
        ("grpo.adam_beta2", 0.99),
        ("grpo.weight_decay", 0.1),
        ("grpo.max_grad_norm", 0.1),
        ("grpo.max_completion_tokens", 786),
        ("grpo.epochs", 1),
        ("grpo.logging_steps", 1),
        ("grpo.samples_every", 1),
        ("grpo.save_steps", 100),
        ("grpo.vllm.gpu_memory_utilization", 0.3),
        ("eval.samples", 0),
        ("eval.max_completion_tokens", 256),
        ("eval.batch_size", 32),
    ],
    "gist-gsm8k-llama": [("model.name", "meta-llama/Llama-3.2-1B-Instruct"), ("model.lora.rank", 16)],
    "math-sft": [
        ("model.name", "Qwen/Qwen2.5-Math-1.5B-Instruct"),
        ("model.lora", None),
        ("data.train.name", "sft_jsonl"),
        ("data.eval.name", "math"),
        ("prompt.format", "r1_zero"),
        ("matcher", "symbolic"),
        ("weights", {"r1_zero": 1.0}),
        ("sft.batch_size", 64),
        ("sft.gradient_accumulation_steps", 8),
        ("sft.epochs", 20),
        ("sft.learning_rate", 5e-5),
        ("sft.weight_decay", 0.0),
        ("sft.adam_beta1", 0.9),
        ("sft.adam_beta2", 0.999),
        ("sft.max_grad_norm", 1.0),
        ("sft.warmup_ratio", 0.0),
        ("sft.lr_scheduler", "cosine"),
        ("sft.eval_every", 5),
        ("eval.max_completion_tokens", 1024),
        ("eval.samples", 0),
        ("eval.baseline", False),
        ("eval.stop_strings", ["</answer>"]),
        ("data.train.limit", None),
        ("data.eval.limit", None),
        ("seed", 42),
        ("grpo.enabled", False),
    ],
    "math-sft-correct-full": [
        ("data.train.path", "MATH/sft_correct.jsonl"),
        ("data.train.limit", None),
        ("sft.epochs", 10),
        ("sft.batch_size", 16),
        ("sft.gradient_accumulation_steps", 8),
        ("sft.eval_every", 20),
    ],
    "math-baseline": [
        ("model.name", "Qwen/Qwen2.5-Math-1.5B-Instruct"),
        ("eval.baseline", True),
        ("eval.temperature", 1.0),
        ("eval.top_p", 1.0),
        ("eval.max_completion_tokens", 1024),
        ("eval.batch_size", 256),
        ("eval.stop_strings", ["</answer>"]),
        ("prompt.format", "r1_zero"),
        ("sft.enabled", False),
        ("grpo.enabled", False),
    ],
    "math-grpo": [
        ("data.train.name", "math"),
        ("data.train.path", None),
        ("sft.enabled", False),
        ("grpo.enabled", True),
        ("grpo.max_steps", 200),
        ("grpo.group_size", 8),
        ("grpo.gradient_accumulation_steps", 128),
        ("grpo.batch_size", 256 // 128),
        ("grpo.steps_per_generation", None),
        ("grpo.num_iterations", 1),
        ("grpo.temperature", 1.0),
        ("grpo.max_completion_tokens", 1024),
        ("grpo.loss.name", "grpo"),
        ("grpo.advantage", "group_normalized"),
        ("grpo.loss.clip_low", 0.2),
        ("grpo.loss.clip_high", 0.2),
        ("grpo.learning_rate", 1e-5),
        ("grpo.adam_beta1", 0.9),
        ("grpo.adam_beta2", 0.95),
        ("grpo.eval_every", 10),
        ("grpo.save_steps", 50),
        ("grpo.lr_scheduler", "cosine"),
        ("weights", {"r1_zero": 1.0}),
    ],
    "r1-zero-numina": [
        ("model.name", "Qwen/Qwen2.5-0.5B"),
        ("model.revision", None),
        ("model.trust_remote_code", False),
        ("model.lora", None),
        ("data.train.name", "numina_tir"),
        ("data.eval.split", "test"),
        ("prompt.format", "think_answer"),
        ("matcher", "latex_verify"),
        (
            "weights",
            {"accuracy": 1.0, "format": 1.0, "reasoning_steps": 1.0, "cosine": 1.0, "repetition": 1.0},
        ),
        ("rewards.0.params", {"neutral": 0.5}),
        ("rewards.2.params", {"steps": 3}),
        ("rewards.3.params", {"max_len": 1000}),
        ("rewards.4.params", {"ngram": 3, "max_penalty": -0.1}),
        ("sft.enabled", False),
        ("grpo.group_size", 8),
        ("grpo.batch_size", 4),
        ("grpo.gradient_accumulation_steps", 2),
        ("grpo.epochs", 1),
        ("grpo.learning_rate", 5e-5),
        ("grpo.save_steps", 50),
        ("grpo.max_completion_tokens", 512),
        ("seed", 42),
        ("grpo.warmup_ratio", 0.1),
        ("grpo.weight_decay", 0.01),
        ("grpo.logging_steps", 10),
        ("grpo.save_total_limit", 2),
        ("eval.batch_size", 32),
        ("grpo.lr_scheduler", "linear"),
        ("grpo.gradient_checkpointing", False),
    ],
}

# Recipe -> lowest and highest total that its system states.
TOTALS = {
    "oneshot-gsm8k": (0.0, 1.2),
    "sft-grpo-dapo": (-6.5, 12.5),
    "math-grpo": (0.0, 1.0),
    "r1-zero-numina": (-0.6, 4.0),
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
    found = [(key, value_at(recipe, key)) for key, _ in STATED[name]]
    assert found == STATED[name]
    stated_order = [list(value) for key, value in STATED[name] if key == "weights"]
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
    low, high = TOTALS[name]
    recipe = load_recipe(name).recipe
    rewards = build_rewards(recipe.rewards, recipe_format(recipe), matcher=recipe.matcher)
    pairs = [(r, spec.weight) for r, spec in zip(rewards, recipe.rewards, strict=True)]
    assert sum(r.high * w for r, w in pairs) == pytest.approx(high)
    assert sum(r.low * w for r, w in pairs) == pytest.approx(low)


def explain(name: str, completion: str, gold: str) -> float:
    recipe = load_recipe(name).recipe
    rewards = build_rewards(recipe.rewards, recipe_format(recipe), matcher=recipe.matcher)
    return sum(
        spec.weight * r(prompts=["q"], completions=[completion], answer=[gold])[0]
        for r, spec in zip(rewards, recipe.rewards, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "completion", "total"),
    [
        ("oneshot-gsm8k", "<reasoning>\n6 * 7\n</reasoning>\n<answer>\n42\n</answer>", 1.2),
        ("oneshot-gsm8k", "<answer>41", 0.1 * 1 / 4),
        ("sft-grpo-dapo", "no idea", -6.5),
        ("sft-grpo-dapo", "6 * 7\n<end_working_out>\n<SOLUTION>\n42\n</SOLUTION>", 12.5),
        ("gist-gsm8k", "<reasoning>\n6 * 7\n</reasoning>\n<answer>\n42\n</answer>\n", 4.0),
        ("math-grpo", "6 * 7 </think> <answer> 42 </answer>", 1.0),
        ("math-grpo", "6 * 7 </think> <answer> 41 </answer>", 0.0),
        ("math-grpo", "6 * 7 </think>\n<answer> 42 </answer>", 0.0),
    ],
)
def test_totals_of_whole_completions(name: str, completion: str, total: float) -> None:
    assert explain(name, completion, "42") == pytest.approx(total)


def test_a_right_r1_zero_completion_beats_the_same_with_a_wrong_answer() -> None:
    text = (
        "<think>\nStep 1: six rows. Step 2: seven each. Step 3: 6 * 7.\n</think>\n\n<answer>\n%s\n</answer>"
    )
    right, wrong = (explain("r1-zero-numina", text % told, "$42$") for told in ("42", "41"))
    assert 3.9 < right <= 4.0
    assert right - wrong > 2  # accuracy and cosine both see the gold answer


def test_group_and_batch_rules_hold_in_every_grpo_recipe() -> None:
    for name in STATED:
        grpo = load_recipe(name).recipe.grpo
        if grpo.enabled:
            assert grpo.group_size >= 2, name
            assert grpo.batch_size * grpo.gradient_accumulation_steps % grpo.group_size == 0, name
    grpo = load_recipe("math-grpo").recipe.grpo
    assert grpo.batch_size * grpo.gradient_accumulation_steps == 256
    grpo = load_recipe("r1-zero-numina").recipe.grpo
    assert grpo.batch_size * grpo.gradient_accumulation_steps == 8
    grpo = load_recipe("r1-zero-numina", ["grpo.batch_size=8"]).recipe.grpo
    assert grpo.batch_size * grpo.gradient_accumulation_steps == 16


def test_the_adapter_reaches_the_seven_projections() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    lora = load_recipe("sft-grpo-dapo").recipe.model.lora
    assert lora is not None
    found = lora_targets(LlamaForCausalLM(config), lora.target_modules)
    assert set(found) == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}


def test_a_module_that_the_model_lacks_is_not_left_out_in_silence() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(
        ConfigError,
        match=r"target_modules: the model \(llama\) has no module 'vproj'.* Did you mean 'v_proj'",
    ):
        lora_targets(LlamaForCausalLM(config), ["q_proj", "vproj"])
    within = ["layers.0.self_attn.q_proj", "mlp.up_proj"]
    assert lora_targets(LlamaForCausalLM(config), within) == within
    with pytest.raises(ConfigError, match=r"no module 'layers\.0\.q_proj'"):  # PEFT would have passed over it
        lora_targets(LlamaForCausalLM(config), ["layers.0.q_proj", "v_proj"])
