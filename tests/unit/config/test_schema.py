"""Recipes: loading, inheritance, overrides, and messages that show the way out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from algorist.cli.explain import describe, explain
from algorist.config import load_recipe, recipe_names, validate
from algorist.config.load import parse_override
from algorist.config.schema import Recipe
from algorist.config.yaml_text import to_yaml
from algorist.errors import ConfigError
from algorist.training.training_arguments import optim_arguments
from benchmarks.stock_trl import trl_config


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_is_valid_and_survives_its_own_yaml(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name).recipe
    assert recipe.description
    again = load_recipe(write(tmp_path, "again.yaml", to_yaml(recipe))).recipe
    assert again == recipe


def test_extends_and_overrides_and_origins(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "name: base\ngrpo: {group_size: 4, batch_size: 8, learning_rate: 1e-5}\n")
    child = write(tmp_path, "child.yaml", "extends: base.yaml\ngrpo: {batch_size: 16}\n")
    loaded = load_recipe(child, ["grpo.max_steps=7", "rewards=[{name: correct}]", "rewards.0.weight=2"])
    assert (loaded.recipe.grpo.group_size, loaded.recipe.grpo.batch_size) == (4, 16)
    assert loaded.recipe.grpo.learning_rate == 1e-5
    assert loaded.recipe.grpo.max_steps == 7
    assert loaded.recipe.rewards[0].weight == 2
    origins = {key: origin for key, _, origin in explain(loaded)}
    assert origins["grpo.group_size"].endswith("base.yaml")
    assert origins["grpo.batch_size"].endswith("child.yaml")
    assert origins["grpo.max_steps"] == "command line"
    assert origins["grpo.beta"] == "default"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["grpo.group_sice=4"], ["grpo.group_sice", "Did you mean 'group_size'"]),
        (
            ["grpo.group_size=6", "grpo.batch_size=16"],
            ["grpo.batch_size", "grpo.group_size = 6", "gradient_accumulation_steps=3"],
        ),
        (["grpo.learning_rate=fast"], ["grpo.learning_rate", "fast"]),
        (["grpo.sampler_correction={low: 1.5}"], ["grpo.sampler_correction.low", "less than or equal to 1"]),
        (
            ["model.tiny.hidden_size=100", "model.tiny.heads=8"],
            ["model.tiny.hidden_size (100)", "model.tiny.heads"],
        ),
        (["prompt.system_prompt=a", "prompt.system_prompt_path=b"], ["system_prompt_path", "keep one"]),
        (["rewards.9.weight=1"], ["not a position"]),
        (
            ["grpo.loss=cispo", "grpo.loss.clip_low=1"],
            [
                "the loss 'cispo' has no parameter 'clip_low'. Did you mean 'clip_high'? It has: importance, clip_high"
            ],
        ),
        (["grpo.loss={name: sapo, delta: 2}"], ["'sapo' has no parameter 'delta'", "temperature_pos"]),
        (
            ["grpo.loss.clip_high=wide"],
            ["grpo.loss.clip_high, a parameter of the loss 'dr_grpo'", "valid number"],
        ),
        (["grpo.loss.clip_high=1e39"], ["less than or equal to 1000000"]),
        (["grpo.epsilon=0.1"], ["Here it is grpo.loss.clip_low=VALUE"]),
        (["grpo.epsilon_high=0.1"], ["Here it is grpo.loss.clip_high=VALUE"]),
        (["grpo.clip_high=0.1"], ["Here it is grpo.loss.clip_high=VALUE"]),
        (["grpo.importance_sampling_level=token"], ["Here it is grpo.loss.importance=VALUE"]),
        (
            ["grpo.loss.delta=0.5"],
            ["grpo.loss.delta", "greater than 1"],
        ),  # it would cap every ratio of right answers
        (["grpo.loss_params.delta=4"], ["Here it is grpo.loss.KEY=VALUE"]),
        (["nonsense"], ["key=value"]),
        (["rewards.².weight=1"], ["is not a position in a list of 2"]),
    ],
)
def test_mistakes_name_the_key_and_the_way_out(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", overrides)
    for part in parts:
        assert part in str(caught.value)


CLIPPED = {"name": "dapo", "importance": "token", "clip_low": 0.2, "clip_high": 0.2, "delta": None}
CAPPED = {"name": "cispo", "importance": "token", "clip_high": 5.0}


@pytest.mark.parametrize(
    ("parent", "child", "overrides", "loss"),
    [
        ("cispo", None, [], CAPPED),
        (None, None, ["grpo.loss=cispo"], CAPPED),
        (None, {"clip_high": 0.3}, ["grpo.loss.clip_low=1e-1"], CLIPPED | {"clip_high": 0.3, "clip_low": 0.1}),
        ("cispo", {"clip_high": 4}, [], CAPPED | {"clip_high": 4.0}),
        ({"name": "dapo", "clip_high": 0.3}, "dapo", [], CLIPPED | {"clip_high": 0.3}),
        # What was said for one loss means nothing for another, in whatever order it is said.
        ({"name": "dapo", "clip_high": 0.3}, "cispo", [], CAPPED),
        ({"clip_high": 0.3}, {"name": "cispo"}, ["grpo.loss.clip_high=3"], CAPPED | {"clip_high": 3.0}),
        ({"name": "dapo", "clip_low": 0.1}, None, ["grpo.loss.clip_high=3", "grpo.loss=cispo"], CAPPED | {"clip_high": 3.0}),
        ({"name": "cispo", "clip_high": 3}, None, ["grpo.loss.name=dapo"], CLIPPED),
        ("mine.py:f", {"cap": 2}, ["seed=1"], {"name": "mine.py:f", "cap": 2}),
    ],
)  # fmt: skip
def test_a_loss_owns_its_parameters(
    parent: Any, child: Any, overrides: list[str], loss: dict[str, Any], tmp_path: Path
) -> None:
    said = [{} if loss_said is None else {"grpo": {"loss": loss_said}} for loss_said in (parent, child)]
    write(tmp_path, "parent.yaml", json.dumps(said[0]))
    mine = write(tmp_path, "mine.yaml", json.dumps({"extends": "parent.yaml", **said[1]}))
    loaded = load_recipe(mine, overrides)
    assert loaded.recipe.grpo.loss.model_dump() == loss
    shown = {key: value for key, value, _ in explain(loaded) if key.startswith("grpo.loss")}
    assert shown == {f"grpo.loss.{key}": value for key, value in loss.items()}


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'quickstart'"):
        load_recipe("quikstart")


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "extends: [a]\n", "extends: self.yaml\n", "1: 2\n"])
def test_damaged_yaml_is_a_config_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load_recipe(write(tmp_path, "self.yaml", text))


def test_yaml_cannot_run_code(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_recipe(write(tmp_path, "evil.yaml", "name: !!python/object/apply:os.system ['true']\n"))


def test_numbers_in_scientific_notation_are_numbers() -> None:
    assert parse_override("a=1e-5") == ("a", 1e-5)
    assert parse_override("a=hello") == ("a", "hello")
    assert parse_override("a='1e5'") == ("a", "1e5")
    assert parse_override("a=[{params: {penalty: 1e-3}}]") == ("a", [{"params": {"penalty": 1e-3}}])
    assert validate({"sft": {"learning_rate": 1e-5}}, where="test").sft.learning_rate == 1e-5


def test_every_key_has_a_description() -> None:
    for key, _, _ in explain(load_recipe("quickstart")):
        assert describe(key) or key.split(".")[0] in {"rewards"}, (
            f"{key} is not documented in config/schema.py"
        )


def test_the_recipe_counts_its_processes() -> None:
    split = ["grpo.batch_size=4", "grpo.gradient_accumulation_steps=1", "grpo.group_size=8"]
    with pytest.raises(ConfigError, match=r"4 × 1 = 4 completions per step.*gradient_accumulation_steps=2"):
        load_recipe("smoke-cpu", split)
    assert load_recipe("smoke-cpu", [*split, "grpo.processes=2"]).recipe.grpo.processes == 2
    with pytest.raises(
        ConfigError, match=r"4 × 1 × 3 = 12 .*gradient_accumulation_steps=2, or .*group_size=6"
    ):
        load_recipe("smoke-cpu", [*split, "grpo.processes=3"])
    with pytest.raises(ConfigError, match=r"steps_per_generation × processes = 6"):
        load_recipe(
            "smoke-cpu",
            [
                "grpo.batch_size=3",
                "grpo.gradient_accumulation_steps=4",
                "grpo.group_size=8",
                "grpo.processes=2",
                "grpo.steps_per_generation=1",
            ],
        )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("load_in_4bit=true", "model.quantization=4bit"),
        ("fast_inference=true", "grpo.engine=vllm"),
        ("max_lora_rank=16", "model.lora.rank=VALUE"),
        ("grpo.num_generations=8", "grpo.group_size=VALUE"),
        ("random_state=3407", "seed=VALUE"),
    ],
)
def test_names_of_trl_and_unsloth_are_answered_with_ours(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"Here it is {re.escape(ours)}"):
        load_recipe("smoke-cpu", [theirs])


def test_an_empty_stop_string_is_refused() -> None:
    for key in ("eval.stop_strings", "grpo.stop_strings"):
        with pytest.raises(ConfigError, match=f"{key} has an empty text"):
            load_recipe("math-baseline", [f"{key}=['']"])


CPU = torch.device("cpu")


def settings(*overrides: str, name: str = "oneshot-gsm8k") -> Recipe:
    return load_recipe(name, list(overrides)).recipe


def arguments_of(recipe: Recipe, folder: Path) -> Any:
    weights = [r.weight for r in recipe.rewards]
    shared = optim_arguments(recipe.grpo, output_dir=folder, seed=0, device=CPU, report_to=recipe.report_to)
    return trl_config(recipe.grpo, shared, weights)


def test_trackers_are_off_until_named_and_bf16_follows_the_device(tmp_path: Path) -> None:
    plain = arguments_of(settings(), tmp_path)
    assert plain.report_to == [] and not plain.bf16
    assert arguments_of(settings("report_to=[wandb]"), tmp_path).report_to == ["wandb"]
    assert (plain.max_completion_length, settings().data.train.max_prompt_tokens) == (200, 256)


def test_a_zero_override_counts_or_is_refused() -> None:
    recipe = settings("grpo.weight_decay=0", "grpo.min_p=0", "seed=0", name="sft-grpo-dapo")
    assert (recipe.grpo.weight_decay, recipe.grpo.min_p, recipe.seed) == (0.0, 0.0, 0)
    with pytest.raises(ConfigError, match=r"grpo\.learning_rate"):
        settings("grpo.learning_rate=0")


@pytest.mark.parametrize(("batch", "accumulation", "works"), [(4, 1, 2), (2, 2, 4), (1, 1, 8)])
def test_the_batch_rule_names_what_works(batch: int, accumulation: int, works: int) -> None:
    wrong = (f"grpo.batch_size={batch}", f"grpo.gradient_accumulation_steps={accumulation}")
    with pytest.raises(ConfigError, match=f"take grpo.gradient_accumulation_steps={works}"):
        settings(*wrong, name="r1-zero-numina")
    right = settings(wrong[0], f"grpo.gradient_accumulation_steps={works}", name="r1-zero-numina").grpo
    assert right.batch_size * right.gradient_accumulation_steps % right.group_size == 0


@pytest.mark.parametrize(
    ("typed", "prompt"), [("", ""), ("''", ""), ("null", None), ("Be brief.", "Be brief.")]
)
def test_an_empty_system_prompt_is_none_at_all(typed: str, prompt: str | None) -> None:
    assert load_recipe("smoke-cpu", [f"prompt.system_prompt={typed}"]).recipe.prompt.system_prompt == prompt


@pytest.mark.parametrize("name", ["1", "12e3", "007", "1_000", "2026-11-28", "yes", "0x10"])
def test_a_run_is_called_what_was_typed(name: str, tmp_path: Path) -> None:
    """YAML reads numbers, a date, and a truth value: a name of 12e3 became 12000.0."""
    recipe = load_recipe("smoke-cpu", [f"run_name={name}", f"model.revision={name}"]).recipe
    assert (recipe.run_name, recipe.model.revision) == (name, name)
    assert load_recipe(write(tmp_path, "again.yaml", to_yaml(recipe))).recipe == recipe


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "model.lora={rank:8}",
            r"model\.lora\.rank:8: unknown key. YAML wants a space after the colon: rank: 8",
        ),
        ("rewards=correct", r"rewards is 'correct'; expected a list, in brackets: rewards=\[…\]"),
        ("grpo=5", r"grpo is 5; expected a section, as \{KEY: VALUE\}, or one of its keys: grpo.KEY=VALUE"),
    ],
)
def test_a_value_of_another_form_is_answered_with_the_form(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_recipe("quickstart", [setting])
