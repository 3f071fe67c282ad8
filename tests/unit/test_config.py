"""Recipes: loading, inheritance, overrides, and messages that show the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from algorist.config import load_recipe, recipe_names, validate
from algorist.config.explain import describe, explain, to_yaml
from algorist.config.load import parse_override
from algorist.errors import ConfigError


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
        (["grpo.group_size=1"], ["grpo.group_size is 1", "take 8"]),
        (
            ["grpo.group_size=6", "grpo.batch_size=16"],
            ["grpo.batch_size", "grpo.group_size = 6", "gradient_accumulation_steps=3"],
        ),
        (["grpo.learning_rate=fast"], ["grpo.learning_rate", "fast"]),
        (
            ["model.tiny.hidden_size=100", "model.tiny.heads=8"],
            ["model.tiny.hidden_size (100)", "model.tiny.heads"],
        ),
        (["prompt.system_prompt=a", "prompt.system_prompt_path=b"], ["system_prompt_path", "keep one"]),
        (["rewards.9.weight=1"], ["not a position"]),
        (["nonsense"], ["key=value"]),
    ],
)
def test_mistakes_name_the_key_and_the_way_out(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", overrides)
    for part in parts:
        assert part in str(caught.value)


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
    assert validate({"sft": {"learning_rate": 1e-5}}, where="test").sft.learning_rate == 1e-5


def test_every_key_has_a_description() -> None:
    for key, _, _ in explain(load_recipe("quickstart")):
        assert describe(key) or key.split(".")[0] in {"rewards"}, (
            f"{key} is not documented in config/schema.py"
        )
