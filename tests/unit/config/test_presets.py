"""``extends``: several parents, the later over the earlier; presets are parents with the settings of a paper."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from algorist.cli.recipes_command import app
from algorist.config import load_recipe
from algorist.config.load import preset_names, recipe_text
from algorist.errors import ConfigError
from algorist.runs.pipeline import Quiet, run_recipe
from tests.tiny import smoke_recipe


def grpo(*overrides: str, recipe: str = "quickstart") -> Any:
    return load_recipe(recipe, overrides).recipe.grpo


def file(folder: Path, name: str, **values: Any) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_every_preset_is_read_whole_and_names_its_paper() -> None:
    for name in preset_names():
        text = recipe_text(name)
        assert re.search(r"^# Paper: https://arxiv.org/abs/\d{4}\.\d{5}$", text, re.M)
        section = grpo(f"extends={name}").model_dump()
        for key, value in yaml.safe_load(text)["grpo"].items():
            inner = section[key] if isinstance(value, dict) else {key: section[key]}
            assert inner.items() >= (value if isinstance(value, dict) else {key: value}).items(), (name, key)


def test_a_parent_on_the_command_line_lies_over_the_recipe_and_under_other_settings() -> None:
    loaded = load_recipe(
        "quickstart", ["grpo.loss.clip_high=4", "grpo.max_steps=7", "extends=presets/scalerl"]
    )
    section = loaded.recipe.grpo
    assert (section.loss.name, section.loss.parameters["clip_high"]) == ("cispo", 4)
    assert (section.reduction, section.max_steps) == ("prompt-mean-token-mean", 7)
    assert loaded.origins["grpo.loss.name"] == loaded.origins["grpo.reduction"] == "presets/scalerl"
    assert loaded.origins["grpo.loss.clip_high"] == "command line"
    other = grpo("extends=presets/scalerl", "grpo.loss=dapo")  # a parameter of CISPO is none of DAPO
    assert (other.loss.name, other.loss.parameters["clip_high"]) == ("dapo", 0.2)
    assert grpo("extends=presets/scalerl", "grpo.pools=null").pools is None


def test_of_several_parents_the_later_one_wins_and_the_file_over_all(tmp_path: Path) -> None:
    mine = file(
        tmp_path, "mine", extends=["quickstart", "presets/w-reinforce"], grpo={"positive_weight": 0.3}
    )
    section = grpo(recipe=mine)
    assert (section.advantage, section.positive_weight) == ("reinforce", 0.3)
    assert section.loss.name == "dr_grpo", "what the preset says nothing of is the quickstart's"
    both = file(tmp_path, "both", extends=["mine.yaml", "presets/scalerl"])
    assert (grpo(recipe=both).advantage, grpo(recipe=both).positive_weight) == (
        "reinforce_plus_plus_baseline",
        0.3,
    )
    loss = file(tmp_path, "loss", extends=["quickstart", "presets/scalerl"], grpo={"loss": "grpo"})
    assert grpo(recipe=loss).loss.parameters["clip_high"] == 0.2
    none = file(tmp_path, "none", extends=["quickstart", "presets/scalerl"], grpo={"pools": None})
    assert load_recipe(none).recipe.grpo.pools is None
    assert not any(key.startswith("grpo.pools.") for key in load_recipe(none).origins)


def test_a_wrong_parent_is_answered(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown recipe 'presets/litepo'\. Did you mean 'presets/lite-ppo'"
    ):
        grpo("extends=presets/litepo")
    for wrong in (3, ["quickstart", 3], {"a": 1}):
        with pytest.raises(
            ConfigError, match=r"extends is .*; expected the name or path of a recipe, or a list"
        ):
            grpo(recipe=file(tmp_path, "wrong", extends=wrong))
    with pytest.raises(ConfigError, match="extends forms a loop"):
        grpo(recipe=file(tmp_path, "loop", extends=["quickstart", "loop.yaml"]))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("loss_agg_mode", "grpo.reduction"),
        ("off_policy_mask_threshold", "grpo.off_policy_mask"),
        ("entropy_coef", "grpo.entropy_bonus"),
    ],
)
def test_names_of_other_programs_are_answered(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=rf"Here it is {ours}="):
        grpo(f"grpo.{theirs}=1")


def test_presets_are_listed_and_shown() -> None:
    rows = json.loads(CliRunner().invoke(app, ["list", "--json"]).output)["rows"]
    assert {row["name"] for row in rows} >= set(preset_names())
    assert "https://arxiv.org/abs/2512.16649" in str(rows)
    shown = CliRunner().invoke(app, ["show", "quickstart", "extends=presets/lite-ppo"]).output
    assert "advantage: batch_normalized  # presets/lite-ppo" in shown


@pytest.mark.slow
def test_a_run_with_a_preset_is_that_of_its_lines_and_loads_again(tmp_path: Path) -> None:
    common = ("sft.enabled=false", "grpo.max_steps=1", "rewards=[random, correct]")
    named = smoke_recipe(tmp_path, *common, "extends=presets/scalerl", "run_name=named")
    lines = (
        "grpo.loss={name: cispo, clip_high: 5.0}",
        "grpo.reduction=prompt-mean-token-mean",
        "grpo.advantage=reinforce_plus_plus_baseline",
        "grpo.pools={solved: 16, hopeless: 0}",
        "grpo.drop_equal_groups=true",
    )
    plain = smoke_recipe(tmp_path, *common, *lines, "run_name=plain")
    losses = []
    for recipe in (named, plain):
        run = run_recipe(recipe, display=Quiet()).folder.path
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert losses[0] == losses[1] != [] and losses[0][0] != 0
    again = load_recipe(str(tmp_path / "named" / "config.yaml")).recipe
    assert again.grpo == named.grpo
