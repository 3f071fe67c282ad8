"""``grpo.preset``: lines under a name; what is set beside it wins, what it is laid over does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from algorist.cli.recipes_command import app
from algorist.config import load_recipe
from algorist.config.presets import preset_named, preset_names
from algorist.errors import ConfigError
from algorist.runs.pipeline import Quiet, run_recipe
from tests.tiny import smoke_recipe


def grpo(*overrides: str, recipe: str = "quickstart") -> Any:
    return load_recipe(recipe, overrides).recipe.grpo


def file(folder: Path, name: str, **values: Any) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_every_preset_is_a_recipe_and_has_a_paper() -> None:
    for name in preset_names():
        preset = preset_named(name)
        assert preset.paper[4] == "." and preset.description and set(preset.lines) == {"grpo"}
        section = grpo(f"grpo.preset={name}").model_dump()
        for key, value in preset.lines["grpo"].items():
            inner = section[key] if isinstance(value, dict) else {key: section[key]}
            assert inner.items() >= (value if isinstance(value, dict) else {key: value}).items(), (name, key)


def test_the_command_lines_preset_stands_over_the_recipe_and_under_other_settings() -> None:
    loaded = load_recipe("quickstart", ["grpo.preset=scalerl", "grpo.loss.clip_high=4", "grpo.max_steps=7"])
    section = loaded.recipe.grpo
    assert (section.loss.name, section.loss.parameters["clip_high"]) == ("cispo", 4)
    assert (section.reduction, section.max_steps) == ("prompt-mean-token-mean", 7)
    assert (
        loaded.origins["grpo.loss.name"] == loaded.origins["grpo.reduction"] == "preset scalerl, 2510.13786"
    )
    assert loaded.origins["grpo.loss.clip_high"] == "command line"
    other = grpo("grpo.preset=scalerl", "grpo.loss=dapo")  # a parameter of CISPO is none of DAPO
    assert (other.loss.name, other.loss.parameters["clip_high"]) == ("dapo", 0.2)
    assert grpo("grpo.preset=justrl", "grpo.pools=null").pools is None
    whole = grpo("grpo={preset: justrl, temperature: 0.9}")
    assert (whole.temperature, whole.learning_rate, whole.loss.parameters["clip_high"]) == (0.9, 1e-6, 0.28)


def test_a_files_preset_stands_over_what_it_extends(tmp_path: Path) -> None:
    mine = file(
        tmp_path, "mine", extends="quickstart", grpo={"preset": "w_reinforce", "positive_weight": 0.3}
    )
    section = grpo(recipe=mine)
    assert (section.advantage, section.positive_weight) == ("reinforce", 0.3)
    assert section.loss.name == "dr_grpo", "what the preset says nothing of is the quickstart's"
    loss = file(tmp_path, "loss", extends="quickstart", grpo={"preset": "scalerl", "loss": "grpo"})
    assert grpo(recipe=loss).loss.parameters["clip_high"] == 0.2


def test_another_preset_takes_the_former_ones_lines_away(tmp_path: Path) -> None:
    mine = file(tmp_path, "mine", extends="quickstart", grpo={"preset": "scalerl"})
    assert grpo(recipe=mine).pools is not None
    for section in (
        grpo("grpo.preset=justrl", recipe=mine),
        grpo(recipe=file(tmp_path, "next", extends=mine, grpo={"preset": "justrl"})),
    ):
        assert (section.pools, section.reduction, section.loss.name) == (None, "token-mean", "dapo")
    off = grpo("grpo.preset=null", recipe=mine)
    assert (off.preset, off.pools, off.reduction) == (None, None, None)


def test_an_unknown_preset_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"grpo\.preset is 'litepo'\. Did you mean 'lite_ppo'"):
        grpo("grpo.preset=litepo")


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


def test_the_verb_shows_lines_and_paper() -> None:
    said = CliRunner().invoke(app, ["presets"]).output
    assert "https://arxiv.org/abs/2512.16649" in said and "advantage: batch_normalized" in said
    assert all(len(line) <= 80 for line in said.split("\n"))
    rows = json.loads(CliRunner().invoke(app, ["presets", "--json"]).output)["presets"]
    assert [row["name"] for row in rows] == preset_names()
    shown = CliRunner().invoke(app, ["show", "quickstart", "grpo.preset=lite_ppo"]).output
    assert "advantage: batch_normalized  # preset lite_ppo, 2508.08221" in shown


def test_a_run_with_a_preset_is_that_of_its_lines_and_loads_again(tmp_path: Path) -> None:
    common = ("sft.enabled=false", "grpo.max_steps=1", "rewards=[random, correct]")
    named = smoke_recipe(tmp_path, *common, "grpo.preset=scalerl", "run_name=named")
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
